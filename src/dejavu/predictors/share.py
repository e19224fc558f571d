"""Bundles as transformers' users share models: `save_pretrained`, `from_pretrained`, `push_to_hub`, a model card.

bundle = from_pretrained("runs/train/opt-tiny/bundle")     # or a repository on the hub
save_pretrained(bundle, "my-bundle")
push_to_hub(bundle, "somebody/opt-tiny-predictors")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu.errors import DataError
from dejavu.predictors.bundle import Bundle, load_bundle, stored_ranks, write_bundle
from dejavu.predictors.manifest import CONFIG, WEIGHTS
from dejavu.tracking.files import by_rename

CARD = "README.md"


def save_pretrained(bundle: Bundle, folder: str | Path) -> Bundle:
    """Write the same bundle to another folder, with its card. Raises DataError for a folder that exists.

    The id stays, unless the bundle is of an older format: it is written in today's, and ids cover the format.
    """
    saved = write_bundle(folder, bundle.config, bundle.tensors)
    by_rename(saved.folder / CARD, lambda path: path.write_text(card(saved.config), "utf-8"))
    return saved


def from_pretrained(name: str | Path, revision: str | None = None) -> Bundle:
    """A bundle from a folder, or else from a repository of that name on the hub.

    Raises DataError for what is neither, and for a bundle that is damaged.
    """
    if Path(name).is_dir():
        return load_bundle(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(str(name), revision=revision, allow_patterns=[CONFIG, WEIGHTS])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"{name} is no folder, and the hub gives no such bundle ({type(error).__name__}): check the name, or "
            "download it elsewhere and give its folder"
        ) from error
    return load_bundle(found)


def push_to_hub(bundle: Bundle, repository: str, private: bool = False) -> str:
    """Upload a bundle and its card; returns where it lies. Raises DataError when the hub does not take it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        card_of = card(bundle.config).encode()
        api.upload_file(path_or_fileobj=card_of, path_in_repo=CARD, repo_id=repository)
        done = api.upload_folder(repo_id=repository, folder_path=bundle.folder, allow_patterns=[CONFIG, WEIGHTS])
    except (HfHubHTTPError, OSError) as error:
        raise DataError(
            f"the hub did not take {repository} ({error}): log in with `hf auth login` and check the name"
        ) from error
    return str(done.commit_url)


def card(config: Mapping[str, Any]) -> str:
    """The model card, from what the bundle says of itself."""
    model, metrics = config["model"], config.get("metrics", {})
    facts = {
        "model": f"{model['name']}, fingerprint {model['fingerprint']}",
        "bundle": config["id"],
        "layers with predictors": f"{len(config['layers'])} of {config['anatomy']['layers']}",
        "tap": config["tap"],
        "rank": "{1}, in the first layer {0}".format(*stored_ranks(config)),
        "form": form(config),
        "label": config.get("label", "contribution"),
        "text": f"{config['corpus']['name']}, hash {config['corpus']['hash']}",
        "documents": len(config["document_hashes"]),
        "stream": stream(config),
        "tokens trained on": metrics.get("tokens", "not said"),
    }
    lines = [
        "---", "library_name: dejavu", "tags: [contextual-sparsity, deja-vu]", "---", "",
        f"# Predictors for {model['name']}", "",
        "Which attention heads and MLP neurons matter for a token, foreseen from an earlier tensor of the same pass,",
        "for the Deja Vu workbench. They fit these weights and no others.", "",
        *(f"- {key}: {value}" for key, value in facts.items()), "",
        *recall_table(metrics), *calibration_table(config.get("calibration")),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def form(config: Mapping[str, Any]) -> str:
    """What the network looks like, in words."""
    parts = ["norm" if config.get("norm", True) else "no norm", f"activation {config.get('activation', 'relu')}"]
    parts.append("biases" if config.get("bias", True) else "no biases")
    return ", ".join([*parts, "one trunk"] if config.get("trunk") else parts)


def stream(config: Mapping[str, Any]) -> str:
    """Which forward pass was recorded."""
    thinned = config.get("stream") or {}
    return f"thinned out by bundle {thinned['bundle']}" if thinned else "the dense model's"


def recall_table(metrics: Mapping[str, Any]) -> list[str]:
    """Recall of mass of each layer on the held-out documents."""
    layers = metrics.get("layers") or {}
    if not layers:
        return []
    densities = list(next(iter(layers.values()))["recall_of_mass"])
    rows = [
        f"| {name} | " + " | ".join(f"{entry['recall_of_mass'][density]:.3f}" for density in densities) + " |"
        for name, entry in layers.items()
    ]
    head = " | ".join(f"{float(density):.0%} computed" for density in densities)
    return [
        "## Recall of mass", "",
        f"On {metrics.get('validation_tokens', 'some')} tokens of held-out documents: the share of all contributions "
        "that the chosen units make up.", "",
        f"| kind and layer | {head} |", "|---" * (len(densities) + 1) + "|", *rows, "",
    ]  # fmt: skip


def calibration_table(calibration: Mapping[str, Any] | None) -> list[str]:
    """Loss over dense on calibration text by share of the body skipped."""
    if not calibration:
        return []
    rows = [f"| {point['skipped']:.1%} | {point['increase']:+.4f} |" for point in calibration["curve"]]
    return [
        "## Calibrated budgets", "",
        f"Found on {calibration['tokens']:,} tokens of the training text of {calibration['corpus']}, with "
        f"{calibration['selector']}.", "",
        "| share of the body's bytes skipped | nats a token over dense |", "|---|---|", *rows, "",
    ]  # fmt: skip
