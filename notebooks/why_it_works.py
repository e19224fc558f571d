# %% [markdown]
# # Why it works
#
# What the dense model did on a few thousand tokens: `dejavu collect` leaves `activity.parquet` beside its cache. An
# active set holds the quarter of the units that contribute most to the residual at a token, of those that contribute
# at all.

# %%
from pathlib import Path

from IPython.display import Image

from dejavu.analysis.activity import read_activity
from dejavu.analysis.activity_figures import hot_and_cold, lookahead_cosine, overlap_of_tokens, union_growth

# %% tags=["parameters"]
run_dir = "runs/readme/collect"  # a collect's folder; your own: "../runs/demo/collect"
figures_dir = "figures"  # where the pictures go, PNG and SVG

# %%
table, figures = read_activity(run_dir), Path(figures_dir)

# %% [markdown]
# ## The choice depends on the token
#
# Above: some units are active at most tokens, many at few. Below: what share of all contribution the best units
# carry, if each token has its own, and if all tokens share one set (what the selector `static` does).

# %%
Image(str(hot_and_cold(table, figures / "hot_and_cold.png")), alt="hot and cold units")

# %% [markdown]
# ## Neighbours choose alike, but not enough to copy
#
# How much of a token's set was active some tokens earlier in the same text. At the right, tokens of other documents:
# what the always active units give.

# %%
Image(str(overlap_of_tokens(table, figures / "overlap_of_tokens.png")), alt="overlap of tokens")

# %% [markdown]
# ## A batch reads the union
#
# Units that at least one of B tokens needs. Where the curve is near 100 %, decoding B sequences together skips
# nothing.

# %%
Image(str(union_growth(table, figures / "union_growth.png")), alt="growth of the union")

# %% [markdown]
# ## The residual turns slowly
#
# A predictor reads a tensor half a block (tap `overlap`) or a whole block (tap `previous`) before the layer computes:
# how near is that to what the layer itself reads? A low cosine, as after a first layer that rewrites the embedding,
# leaves little to foresee with.

# %%
Image(str(lookahead_cosine(table, figures / "lookahead_cosine.png")), alt="cosine of residuals across layers")
