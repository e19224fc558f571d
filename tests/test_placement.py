"""Models that do not fit one device: layers in memory and on disk, and all as if they were in one place."""

import hub_folders
import pytest
import torch
from tiny import tiny_llama

from dejavu.activations.collect import cache_head, collect
from dejavu.activations.writer import CacheWriter
from dejavu.checks import check
from dejavu.errors import ConfigError, DataError
from dejavu.models.contribution import Contributions
from dejavu.models.load import LoadedModel, load_model
from dejavu.models.placement import described, limits, planned
from dejavu.schema import Collect, Config, Model
from dejavu.sparsity.budget import Budget
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Oracle, Selector, Tokens
from dejavu.sparsity.training_free import LowRank, SignBits
from dejavu.stages.inputs import check_backend

FORMS = ("opt-125m", "opt-350m", "llama")  # pre-norm and post-norm as .bin, gated as sharded safetensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in FORMS:
        if name == "llama":
            model = tiny_llama(vocab_size=4096, num_hidden_layers=6).half()
            hub_folders.write_model(root / name, model, "sharded")
        else:
            hub_folders.write_model(root / name, hub_folders.build(name, 4096), "bin")
        hub_folders.write_embedded_tokenizer(root / name)
    return root


def settings(folders, name: str, **placing) -> Config:
    return Config(model=Model(name=name, path=str(folders / name), **placing), device="cpu")


@pytest.fixture(scope="module", params=FORMS)
def pair(request, folders, tmp_path_factory) -> tuple[LoadedModel, LoadedModel, Config]:
    """The model in one place, and with the embeddings and about half of the layers in memory, the others on disk."""
    name = request.param
    whole = load_model(settings(folders, name))
    block, tables = (
        sum(parameter.numel() * 4 for parameter in module.parameters())
        for module in (whole.anatomy.blocks[0].layer, whole.model.get_input_embeddings())
    )
    offload = None if name == "llama" else str(tmp_path_factory.mktemp("offload"))
    largest = tables if name == "llama" else block  # room for what comes from disk; here llama's head is no embedding
    room = f"{(tables + largest + block * whole.anatomy.layers // 2) // 1000}KB"
    config = settings(folders, name, device_map="auto", cpu_memory=room, offload=offload)
    return whole, load_model(config), config


IDS = torch.randint(3, 4096, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def logits(loaded: LoadedModel, selector: Selector | None = None) -> tuple[torch.Tensor, Sparsifier | None]:
    parts = loaded.anatomy
    if selector is None:
        return loaded.model(input_ids=IDS, use_cache=False).logits, None
    budget = Budget((parts.neurons // 4,) * parts.layers, (parts.heads // 2,) * parts.layers)
    heads = (parts.heads,) * parts.layers if selector.name in ("svd", "sign") else budget.heads
    sparsifier = Sparsifier(parts, selector, Budget(budget.mlp, heads), record=True)
    every_N = torch.ones(IDS.numel(), dtype=torch.bool)
    place_N = torch.arange(IDS.numel())
    with sparsifier.attached():
        sparsifier.begin(Tokens(every_N, place_N, place_N))
        return loaded.model(input_ids=IDS, use_cache=False).logits, sparsifier


def test_layers_are_in_memory_and_on_disk_as_planned(pair):
    whole, split, config = pair
    on_disk = [name for name, parameter in split.model.named_parameters() if parameter.is_meta]
    assert 0 < len(on_disk) < len(list(split.model.named_parameters()))
    with torch.device("meta"):
        shape = type(split.model)(split.model.config)
    assert planned(shape, "auto", limits(config.model, torch.device("cpu"))) == split.model.hf_device_map
    assert "in memory" in split.places and "on disk" in split.places and whole.places is None


def test_it_is_the_same_model(pair):
    whole, split, _ = pair
    assert split.fingerprint == whole.fingerprint and split.parameters == whole.parameters
    assert split.device == torch.device("cpu")
    assert torch.equal(logits(split)[0], logits(whole)[0])


def test_contributions_read_weights_wherever_they_are(pair):
    ours, theirs = (Contributions(loaded.anatomy) for loaded in pair[:2])
    for layer in (0, pair[0].anatomy.layers - 1):
        assert torch.equal(ours.column_norms(layer), theirs.column_norms(layer))
        assert torch.equal(ours.head_factors(layer), theirs.head_factors(layer))


@pytest.mark.parametrize("name", ["oracle", "svd", "sign"])
def test_sparse_layers_leave_out_the_same_units(pair, name):
    results = []
    for loaded in pair[:2]:
        parts = loaded.anatomy
        norms = Contributions(parts)
        selector = {"oracle": Oracle(), "svd": LowRank(parts, norms, 4), "sign": SignBits(parts, norms)}[name]
        results.append(logits(loaded, selector))
    (expected, one), (found, other) = results
    assert torch.equal(found, expected) and not torch.equal(expected, logits(pair[0])[0])
    assert one.masks.keys() == other.masks.keys() and len(one.masks) > 0
    assert all(torch.equal(one.masks[key], other.masks[key]) for key in one.masks)


def test_the_recorder_writes_the_same_cache(pair, tmp_path):
    files = []
    for number, loaded in enumerate(pair[:2]):
        blocks_NT, documents_NT = IDS.numpy(), torch.zeros_like(IDS).numpy()
        how = Collect(encoding="dense")
        head = cache_head(loaded, blocks_NT, documents_NT, 2, how)
        with CacheWriter(tmp_path / str(number), head) as writer:
            collect(loaded, blocks_NT, documents_NT, writer, 2, how)
            writer.finish()
        names = sorted(path.name for path in (tmp_path / str(number)).glob("*.*[0-9]"))
        files.append({name: (tmp_path / str(number) / name).read_bytes() for name in names})
    assert files[0] == files[1] and len(files[0]) > 4 * pair[0].anatomy.layers


def test_a_tensor_missing_on_disk_is_refused(folders, tmp_path):
    weights = torch.load(folders / "opt-125m" / "pytorch_model.bin", weights_only=True)
    del weights["model.decoder.layers.11.fc2.weight"]
    hub_folders.write_model(tmp_path, hub_folders.build("opt-125m", 4096), "bin")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    model = Model(name="x", path=str(tmp_path), device_map="auto", cpu_memory="2MB", offload=str(tmp_path / "off"))
    with pytest.raises(DataError, match=r"do not fill the model .*layers\.11\.fc2\.weight"):
        load_model(Config(model=model, device="cpu"))


def test_weights_that_must_be_written_anew_need_a_folder(folders):
    with pytest.raises(DataError, match=r"model\.offload=DIR"):
        load_model(settings(folders, "opt-125m", device_map="auto", cpu_memory="2MB"))


def test_places_in_words():
    assert described({"": "disk"}) == "all layers on disk"
    places = {"model.embed": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": "cpu", "head": 0}
    assert described(places) == "layers 0 to 1 on GPU 0, 2 in memory"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"cpu_memory": "8GiB"}, "model.cpu_memory=8GiB says where layers go, which needs model.device_map=auto"),
        ({"device_map": "everywhere"}, "model.device_map=everywhere is not known"),
        ({"device_map": "auto", "gpu_memory": "70"}, "model.gpu_memory=70 is no size"),
        ({"device_map": "auto", "random_init": True}, "leave model.device_map out"),
    ],
)
def test_values_that_cannot_work_are_refused(model, said):
    with pytest.raises(ConfigError, match=said):
        check(Config(model=Model(**model)))


@pytest.mark.parametrize(
    ("stage", "backend"), [("evaluate", "kernel"), ("generate", "kernel"), ("benchmark", "kernel")]
)
def test_the_engine_refuses_a_device_map(stage, backend):
    with pytest.raises(ConfigError, match="use backend=simulate"):
        check_backend(stage, Config(model=Model(device_map="auto"), backend=backend))
