# %% [markdown]
# # Sparsity against accuracy
#
# What a folder of evaluations says: `run_dir` is a sweep or a pipeline's folder. Nothing is computed here but
# differences; `dejavu report run_dir=DIR` makes one page of it.

# %%
from pathlib import Path

import pandas as pd
from IPython.display import Image, Markdown, display

from dejavu.analysis import load_runs
from dejavu.analysis.leaderboard import failures, pictures
from dejavu.analysis.runs import neighbours
from dejavu.analysis.tables import MAIN_METRICS, in_order, readable

# %% tags=["parameters"]
run_dir = "runs/readme"  # in this folder: an excerpt of the runs behind the README; your own: "../runs/demo"
figures_dir = "figures"  # where the pictures go, PNG and SVG

# %%
pd.set_option("display.max_rows", None, "display.max_columns", None)
table = load_runs(run_dir)
models = ", ".join(table["model"].unique())
display(Markdown(f"{Path(run_dir).resolve().name}: {table['run'].nunique()} evaluations of {models}."))

# %% [markdown]
# Value ± standard error; in brackets the paired difference to the dense model over the same text.

# %%
readable(table).style.hide(axis="index")

# %%
failed = failures(run_dir)
if len(failed):
    display(Markdown("## What failed"), failed.style.hide(axis="index"))

# %% [markdown]
# ## Pictures
#
# Bands are 95 % intervals. At equal sparsity first, then at an equal share of the weights really skipped; the heat
# maps show every layer's density and the share of all contribution that its chosen units carry.

# %%
for path in pictures(run_dir, figures_dir):
    display(Image(str(path), alt=path.stem.replace("_", " ")))

# %% [markdown]
# ## Is each selector really better than the next?
#
# Paired over the same documents: worse minus better, where both were scored at the same ratios.

# %%
pairs = neighbours(in_order(table[table["metric"].isin(MAIN_METRICS)]), run_dir)
shown = pairs.drop(columns=["model", "better_run", "worse_run"]).style.hide(axis="index")
shown.format(precision=4).format("{:.0%}", subset=["mlp", "heads"])
