# %% [markdown]
# # Latency
#
# Quality and speed of one object: evaluations with `backend=kernel` time the very tokens that they score, as in
# `dejavu evaluate -cd sweeps -cn engine`. Milliseconds of two runs do not compare, curves of one do.

# %%
from pathlib import Path

from IPython.display import Image, display

from dejavu.analysis.latency import benchmarks, latency, pareto, speed_and_quality

# %% tags=["parameters"]
run_dir = "runs"  # evaluations that decoded, and benchmarks, anywhere below; your own: "../runs"
figures_dir = "figures"  # where the pictures go, PNG and SVG

# %%
figures = Path(figures_dir)
table = speed_and_quality(run_dir)
columns = ["storage", "selector", "mlp", "heads", "ms_per_token", "value", "stderr", "delta", "delta_stderr"]
points = table[table["metric"] == "token_perplexity"].sort_values(["storage", "mlp"])
points[columns].style.hide(axis="index").format(precision=2, na_rep="")

# %% [markdown]
# ## What is given up for which speed

# %%
Image(str(pareto(table, figures / "pareto.png")), alt="latency against perplexity")

# %% [markdown]
# ## Against other engines, and against the memory
#
# Random weights of a real shape; the dotted floor is what reading the bytes alone would take.

# %%
for run, rows in benchmarks(run_dir).items():
    name = run.replace("/", "_")
    display(
        Image(str(latency(rows, figures / f"latency_{name}.png")), alt=f"latency against the share computed, {name}")
    )
