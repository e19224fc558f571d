"""What a model costs, foreseen from its sizes: real files, every OPT, and the paper's own numbers beside it."""

from pathlib import Path

import hub_folders
import pytest
import torch
from bundles import untrained_bundle
from omegaconf import OmegaConf
from test_packaged import SMOLLM2, needs_smollm2
from tiny import tiny_llama, tiny_opt

from dejavu.activations.collect import cache_head, collect
from dejavu.activations.writer import CacheWriter
from dejavu.benchmark import devices, paper, plan
from dejavu.cli import CONF
from dejavu.errors import ConfigError
from dejavu.models import EMBEDDED
from dejavu.models.families import anatomy
from dejavu.models.load import load_model, model_source, without_weights
from dejavu.models.placement import described, planned
from dejavu.schema import Config, Corpus, Model, Predictor, Sparsity
from dejavu.sparsity.budget import make_budget
from dejavu.stages import doctor
from dejavu.stages.collect import corpus_blocks
from dejavu.stages.plan import said

OPT = ("opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "opt-175b")


def in_group(name: str, **settings) -> Config:
    """A config with a model of the group conf/model."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    return Config(model=Model(**values), **settings)


def sized(config: Config) -> plan.Sized:
    model, stored, _ = without_weights(config, online=False)
    return plan.Sized(model, anatomy(model), stored)


def near(found: float, real: float) -> bool:
    return abs(found - real) <= 0.01 * real


def files_of(folder, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.suffix != ".json")


def check_files(config: Config, weights: int, tmp_path) -> None:
    """Weights, a small real cache and a real bundle against the plan."""
    found, loaded = sized(config), load_model(config)
    assert near(found.file_bytes, weights) and found.parameters == loaded.parameters
    _, blocks_NT, documents_NT = corpus_blocks(config, loaded, config.corpus.tokens)
    head = cache_head(loaded, blocks_NT, documents_NT, config.batch_size, config.collect)
    with CacheWriter(tmp_path / "cache", head) as writer:
        collect(loaded, blocks_NT, documents_NT, writer, config.batch_size, config.collect)
        writer.finish()
    assert near(plan.cache_bytes(found.anatomy, config), files_of(tmp_path / "cache"))
    rank = found.anatomy.width // 8
    config.predictor.first_rank = rank
    untrained_bundle(loaded.model, tmp_path / "bundle", rank=rank)
    assert near(plan.bundle_bytes(found.anatomy, config), files_of(tmp_path / "bundle"))


def test_the_files_of_opt_tiny_are_as_planned(tmp_path):
    config = in_group("opt-tiny", corpus=Corpus(tokens=8192))
    check_files(config, (EMBEDDED / "opt-tiny" / "model.safetensors").stat().st_size, tmp_path)


@needs_smollm2
def test_the_files_of_smollm2_are_as_planned(tmp_path):
    config = Config(model=SMOLLM2, corpus=Corpus(tokens=256), batch_size=1)
    check_files(config, files_of(Path(model_source(config)), "*.safetensors"), tmp_path)


@pytest.mark.parametrize("name", OPT)
def test_every_opt_has_its_published_size(name):
    found = sized(in_group(name))
    published = float(name[4:-1]) * (1e9 if name.endswith("b") else 1e6)
    assert abs(found.parameters - published) < 0.08 * published
    assert found.stored == torch.float16 and found.anatomy.context == 2048
    assert found.anatomy.width % found.anatomy.heads == 0 and found.anatomy.neurons == 4 * found.anatomy.width
    assert found.anatomy.post_norm == (name == "opt-350m")


def test_known_parameter_counts():
    counts = {name: sized(in_group(name)).parameters for name in ("opt-125m", "opt-350m", "opt-1.3b")}
    assert counts == {"opt-125m": 125_239_296, "opt-350m": 331_196_416, "opt-1.3b": 1_315_758_080}


def test_a_folders_own_sizes_come_before_the_config_groups(tmp_path):
    hub_folders.build("opt-125m", 4096).config.save_pretrained(tmp_path)
    config = in_group("opt-66b")
    config.model.path = str(tmp_path)
    model, stored, source = without_weights(config, online=False)
    assert source == str(tmp_path) and stored == torch.float16
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (12, 48)


def test_a_model_of_unknown_size_is_told():
    with pytest.raises(ConfigError, match=r"model\.path=DIR"):
        without_weights(in_group("llama"), online=False)


@pytest.mark.parametrize("build", [tiny_opt, tiny_llama])
def test_a_tokens_bytes_count_what_is_kept(build):
    model = build()
    found = plan.Sized(model, anatomy(model), torch.float16)
    config = Config(
        sparsity=Sparsity(selector="oracle", mlp=0.75, heads=0.5, dense_layers=[0]), predictor=Predictor(rank=4)
    )
    parts = found.anatomy
    group = 4 if build is tiny_opt else 2 * (1 + 0.5)  # matrices of a head: k and v are shared by two
    neuron = 2 if build is tiny_opt else 3
    read = plan.token_terms(found, config, make_budget(config.sparsity, parts), 2, positions=10)
    assert read.body == 2 * 32 * (neuron * (64 + 16) + group * 8 * (4 + 2))
    assert read.embedding == 2 * 96 * 32
    assert read.cache == 2 * 2 * 10 * 8 * (4 + 2) * parts.kv_heads / 4
    halves = 2 * 32 + (32 * 4 + 4) + (4 * 64 + 64), 2 * 32 + (32 * 4 + 4) + (4 * 4 + 4)
    assert read.predictors == 2 * sum(halves)  # of layer 1 alone: layer 0 is dense
    dense = plan.token_terms(found, config, make_budget(Sparsity(selector="dense"), parts), 2, positions=10)
    assert dense.predictors == 0 and dense.body == 2 * 32 * 2 * (neuron * 64 + group * 8 * 4)


def test_opt_1_3b_at_a_quarter():
    config = in_group("opt-1.3b", sparsity=Sparsity(selector="predictor", ratio=0.75))
    found = sized(config)
    read = plan.token_terms(found, config, make_budget(config.sparsity, found.anatomy), 2)
    assert read.body == 2 * 24 * 2048 * (2 * 2048 + 4 * 8 * 64)  # a quarter of 8,192 neurons and of 32 heads
    assert read.embedding == 2 * 50_272 * 2048 and read.cache == 2 * 24 * 2 * 512 * 8 * 64
    matrices = 2 * (1024 + 23 * 256) * (2048 + 8192 + 2048 + 32)
    assert near(read.predictors, matrices)  # norms and biases are less than a hundredth of them


def test_a_shared_trunk_counts_once():
    model = tiny_opt()
    found = plan.Sized(model, anatomy(model), torch.float16)
    budget = make_budget(Sparsity(selector="predictor", mlp=0.5, heads=0.0), found.anatomy)
    apart, shared = (
        plan.token_terms(found, Config(predictor=Predictor(rank=4, first_rank=4, trunk=trunk)), budget, 2).predictors
        for trunk in (False, True)
    )
    assert apart - shared == 2 * (32 * 4 + 4)


def test_memory_grows_with_what_it_is_for():
    config = in_group("opt-125m")
    found = sized(config)
    needed = plan.memory(found, config)
    assert needed["collect"] > 4 * found.parameters and needed["evaluate"] > 4 * found.parameters
    trained = sum(plan.predictor_weights(found.anatomy, config).values())
    assert 16 * trained < needed["train"] < 16 * trained + 2**25
    config.dtype, config.batch_size = "float16", 32
    half = plan.memory(found, config)
    assert half["collect"] - 2 * found.parameters > needed["collect"] - 4 * found.parameters


def test_the_papers_setting():
    rows = {(row.name, row.prompt): row for row in paper.compared(sized(in_group("opt-175b")))}
    dense, sparse = rows["dense (FasterTransformer)", 512], rows["Deja Vu", 512]
    # 96 layers of 12 d^2 weights of two bytes, an embedding, 512 positions; eight times 2,039 GB/s.
    d = 12_288
    assert dense.terms.total == 2 * (96 * 12 * d * d + 50_272 * d + 96 * 2 * d * 512)
    assert dense.floor_ms == pytest.approx(dense.terms.total / (8 * 2039e6))
    body = 96 * (0.10 * 8 + 0.42 * 4) * d * d
    predictors = 96 * (1000 * 5 * d + 512 * (d + 96))
    assert sparse.terms.total == pytest.approx(2 * (body + predictors + 50_272 * d + 0.42 * 96 * 2 * d * 512))
    assert dense.floor_ms < dense.reading_ms < dense.published_ms == 41.7
    assert sparse.floor_ms < sparse.reading_ms < sparse.published_ms == 19.8
    assert dense.rest_us_per_half == pytest.approx(1000 * (41.7 - dense.terms.total / 12e9) / 192)


def test_devices():
    eight = devices.parse("8xA100-80G")
    assert (eight.count, eight.all_memory_gb, eight.all_bandwidth_gb_s) == (8, 640, 16_312) and str(
        eight
    ) == "8xA100-80G"
    assert devices.parse("H200-141G").count == 1
    for wrong in ("8xA100", "0xA100-80G", "A 100", "x"):
        with pytest.raises(ConfigError, match="is not known"):
            devices.parse(wrong)
    assert devices.found(torch.device("cpu")).bandwidth_gb_s > 0


def test_hours_follow_the_tokens():
    config = in_group("opt-66b", corpus=Corpus(tokens=400_128))
    found = sized(config)
    one, eight = (plan.hours(found, config, devices.parse(name)) for name in ("A100-80G", "8xA100-80G"))
    assert one == eight, "layers on several devices run one after another"
    assert one["evaluate"] == pytest.approx(2 * found.parameters * 1e6 / (0.4 * 312e12) / 3600)
    disk = plan.cache_bytes(found.anatomy, config) / 1e9 / 3600
    assert one["collect"] == pytest.approx(0.400128 * one["evaluate"] + disk)
    assert one["train"] > 4 * disk
    assert plan.hours(found, config, devices.found(torch.device("cpu"))) == {}


def cost(config: Config, machine: devices.Device) -> str:
    """A row of docs/reproduce.md."""
    found = sized(config)
    memory, hours = plan.memory(found, config), plan.hours(found, config, machine)
    bytes_ = (found.file_bytes, plan.cache_bytes(found.anatomy, config), plan.bundle_bytes(found.anatomy, config))
    cells = [*map(said, bytes_), *(said(memory[stage]) for stage in ("collect", "train", "evaluate"))]
    return " | ".join(
        [config.model.name, *cells, *(f"{hours[stage]:.2g}" for stage in ("collect", "train", "evaluate"))]
    )


def test_the_costs_in_the_docs_are_the_plans():
    page = (CONF.parent / "docs" / "reproduce.md").read_text()
    machine = devices.parse("8xA100-80G")
    settings = {
        "norm": False,
        "activation": "none",
        "bias": False,
        "rank": 1000,
        "first_rank": 1000,
    }  # predictor=reference
    for name in OPT:
        config = in_group(name, dtype="float16", corpus=Corpus(tokens=400_000), predictor=Predictor(**settings))
        assert f"| {cost(config, machine)} |" in page
    for row in paper.compared(sized(in_group("opt-175b"))):
        figures = (row.floor_ms, row.reading_ms, row.published_ms, row.rest_ms)
        cells = [row.name, str(row.prompt), said(row.terms.total), *(f"{figure:.1f}" for figure in figures)]
        assert f"| {' | '.join(cells)} | {row.rest_us_per_half:.0f} |" in page


def test_layers_are_placed_on_devices_that_are_not_here():
    model, _, _ = without_weights(in_group("opt-66b", dtype="float16"), online=False)
    places = planned(model, "auto", {0: 72 * 10**9, 1: 72 * 10**9, "cpu": 0})
    assert set(places.values()) == {0, 1}
    assert described(places).startswith("layers 0 to ") and described(places).endswith("to 63 on GPU 1")
    small = planned(model, "auto", {0: 72 * 10**9, "cpu": 30 * 10**9})
    assert set(small.values()) == {0, "cpu", "disk"}


def test_doctor_prints_the_plan(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = in_group("opt-175b", devices="8xA100-80G", dtype="float16")
    config.model.device_map = "auto"
    assert doctor.diagnose(config) == 1, "the weights are not here, the plan is"
    shown = capsys.readouterr().out
    for words in (
        "174,604,468,224 parameters",
        "349 GB",
        "rank 1536",
        "model.device_map=auto: layers 0 to",
        "16,312 GB/s",
    ):
        assert words in shown
    assert "FasterTransformer" in shown and "41.7" in shown and "192" in shown


def test_doctor_refuses_devices_it_does_not_know():
    with pytest.raises(ConfigError, match="did you mean A100-80G"):
        doctor.diagnose(Config(devices="2xA100-80"))
