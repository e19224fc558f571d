# %% [markdown]
# # Predictors
#
# How training went, what the predictors choose in each layer, and what is lost when they decide.

# %%
from pathlib import Path

from IPython.display import Image

from dejavu.analysis import load_runs
from dejavu.analysis.predictor_figures import read_bundle, recall_of_layers, training_curve

# %% tags=["parameters"]
run_dir = "runs/readme"  # a pipeline's folder, with train/ and evaluate/; your own: "../runs/demo"
figures_dir = "figures"  # where the pictures go, PNG and SVG

# %%
train, figures = Path(run_dir) / "train", Path(figures_dir)
bundle = read_bundle(train)
print(f"bundle {bundle['id']}: tap {bundle['tap']}, rank {bundle['rank']}, corpus {bundle['corpus']['name']}")
Image(str(training_curve(train, figures / "training_curve.png")), alt="training loss and recall")

# %% [markdown]
# ## Layer by layer
#
# Share of all contribution that the chosen quarter carries, on held-out documents; `static` chooses the same units at
# every token and costs nothing.

# %%
Image(str(recall_of_layers(bundle, figures / "recall_of_layers.png")), alt="recall of mass by layer")

# %% [markdown]
# ## What is lost
#
# Nats a token over the dense model, paired over the same text. A predictor is worth its cost between the best
# selector that needs no training and `oracle`.

# %%
losses = load_runs(run_dir).query("metric == 'loss' and selector != 'dense'")
shown = losses.pivot_table(index="selector", columns="mlp", values="delta").style
shown.format(precision=3).format_index("{:.0%} skipped", axis=1)
