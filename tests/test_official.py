"""lm-eval's own tasks: rows, equality with stock lm-eval, and what stands in a row."""

from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM
from rows import data_folder, write
from tiny import tiny_opt

from dejavu.corpora.available import BENCHMARKS, check_benchmark
from dejavu.corpora.benchmarks import benchmark_rows
from dejavu.corpora.sources import documents
from dejavu.errors import DataError
from dejavu.evaluation import official
from dejavu.evaluation.scoring import Request, Scorer
from dejavu.evaluation.tasks import lm_eval_samples, note, run_task, scored_documents
from dejavu.models.families import anatomy
from dejavu.models.load import EMBEDDED, LoadedModel
from dejavu.schema import BENCHMARKS as NAMES
from dejavu.schema import Config, Corpus, Task

COUNTS = {
    "winogrande": 1267, "openbookqa": 500, "wikitext": 62, "c4": 501, "piqa": 1838, "copa": 100, "cb": 56, "rte": 277,
    "lambada_openai": 5153,
}  # fmt: skip
CHOICES = ("winogrande", "openbookqa", "piqa", "copa", "cb", "rte", "lambada_openai")
ROLLING = ("wikitext", "c4")


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory) -> Path:
    return data_folder(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A random model with OPT's way of adding `</s>` and a context short enough for windows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "opt-tiny")
    model = tiny_opt(vocab_size=len(tokenizer), max_position_embeddings=96)
    return LoadedModel("tiny", model, tokenizer, anatomy(model))


def stock(loaded: LoadedModel) -> HFLM:
    return HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, max_length=loaded.anatomy.context)


def responses(name: str, root: Path, limit: int, scorer: Scorer, **settings) -> list:
    samples = lm_eval_samples(official.official_task(name, root), limit, scorer, **settings)
    return [value for sample in samples for value in sample["filtered_resps"]]


def stock_responses(name: str, root: Path, limit: int, loaded: LoadedModel) -> list:
    from lm_eval.evaluator import evaluate

    task = official.official_task(name, root)
    results = evaluate(stock(loaded), {name: task}, limit=limit, bootstrap_iters=0, log_samples=True)
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [value for sample in samples for value in sample["filtered_resps"]]


def flat(values: list) -> list[float]:
    return [float(value[0] if isinstance(value, tuple) else value) for value in values]


def test_the_schema_names_the_benchmarks_that_exist():
    assert set(NAMES) == set(BENCHMARKS) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_generated_rows_load_in_the_tasks_own_form(name, rows_folder):
    task = official.official_task(name, rows_folder)
    assert len(task.eval_docs) == 6
    (split,) = BENCHMARKS[name].files
    assert {task.config.validation_split, task.config.test_split} == {split, None}
    assert task.config.dataset_path == BENCHMARKS[name].hub  # lm-eval's own definition, not one of ours


@pytest.mark.data
@pytest.mark.parametrize("name", COUNTS)
def test_real_rows_have_the_published_counts(name, data_root):
    assert len(official.official_task(name, data_root).eval_docs) == COUNTS[name]


@pytest.mark.data
def test_wikitext_pages_are_the_articles_of_the_raw_file(data_root):
    pages = benchmark_rows("wikitext", data_root)
    assert "".join(page["page"] for page in pages) == (data_root / "wikitext2/wiki.test.raw").read_text("utf-8")


@pytest.mark.parametrize("name", CHOICES)
def test_dense_scores_equal_stock_lm_evals(name, loaded, rows_folder):
    ours, theirs = (
        responses(name, rows_folder, 6, Scorer(loaded)),
        stock_responses(name, rows_folder, 6, loaded),
    )
    assert flat(ours) == pytest.approx(flat(theirs), rel=1e-4)
    assert [value[1] for value in ours] == [value[1] for value in theirs]


@pytest.mark.parametrize("name", ROLLING)
def test_rolling_scores_equal_stock_lm_evals_with_its_doubled_separator(name, loaded, rows_folder):
    ours = responses(name, rows_folder, 6, Scorer(loaded), stock_bos=True)
    assert flat(ours) == pytest.approx(flat(stock_responses(name, rows_folder, 6, loaded)), rel=1e-4)


@pytest.mark.parametrize("name", ROLLING)
def test_the_difference_to_stock_is_the_separator_scored_as_a_word(name, loaded, rows_folder):
    task = official.official_task(name, rows_folder)
    text = task.doc_to_target(task.eval_docs[0])
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) < loaded.anatomy.context - 1, "the first row must fit one window"
    (once,), (twice,) = (
        flat(responses(name, rows_folder, 1, Scorer(loaded), stock_bos=stock_bos)) for stock_bos in (False, True)
    )
    scored = Scorer(loaded).score([Request([2], ids), Request([2], [2, *ids])])
    assert (once, twice) == pytest.approx(tuple(result.loglikelihood for result in scored), rel=1e-5)
    assert abs(once - twice) > 0.1


@pytest.mark.data
@pytest.mark.parametrize("name", CHOICES[:2])
def test_dense_scores_equal_stock_lm_evals_on_real_rows(name, data_root):
    from dejavu.models.load import load_model

    embedded = load_model(Config())
    ours = flat(responses(name, data_root, 25, Scorer(embedded)))
    assert ours == pytest.approx(flat(stock_responses(name, data_root, 25, embedded)), rel=1e-4)


@pytest.mark.parametrize("name", COUNTS)
def test_samples_give_lm_evals_own_metrics(name, loaded, rows_folder):
    """Values equal what lm-eval aggregates itself from the same samples."""
    from lm_eval.evaluator import evaluate

    from dejavu.evaluation.adapter import DejaVuLM
    from dejavu.evaluation.metrics import measure

    names = [metric["metric"] for metric in official.official_task(name, rows_folder).config.metric_list]
    config = Config(data_root=str(rows_folder))
    samples = run_task("t", Task(kind="lm_eval", corpus=name, metrics=names), config, Scorer(loaded))
    entries = measure(samples, names)
    task = official.official_task(name, rows_folder)
    results = evaluate(DejaVuLM(Scorer(loaded)), {name: task}, bootstrap_iters=0)["results"][name]
    for metric, entry in entries.items():
        assert entry["value"] == pytest.approx(results[f"{metric},none"], rel=1e-6), metric
        assert entry["n"] == 6
        stderr = results.get(f"{metric}_stderr,none")
        if metric.startswith("acc") and isinstance(stderr, float):
            assert entry["stderr"] == pytest.approx(stderr)


def test_the_tasks_files_name_the_metrics_of_lm_evals_definitions(rows_folder):
    from omegaconf import OmegaConf

    folder = Path(__file__).parents[1] / "conf" / "tasks"
    seen = set()
    for path in folder.glob("*.yaml"):
        for entry in (OmegaConf.load(path).get("run") or {}).values():
            if entry.get("kind") == "lm_eval":
                task = official.official_task(entry.corpus, rows_folder)
                assert set(entry.metrics) == {metric["metric"] for metric in task.config.metric_list}, path.name
                seen.add(entry.corpus)
    assert seen == set(COUNTS)


@pytest.mark.parametrize("name", ["openbookqa", "wikitext", "c4"])
def test_a_row_is_the_same_document_as_in_the_corpus_of_its_name(name, rows_folder):
    """So that predictors trained on the corpus are refused where the task scores it."""
    config = Config(data_root=str(rows_folder))
    split = next(iter(BENCHMARKS[name].files))
    corpus = {document.hash for document in documents(name, split, rows_folder, Corpus(name=name))}
    scored = scored_documents(Task(kind="lm_eval", corpus=name, metrics=["acc"]), config)
    assert {document.hash for document in scored} == corpus


def test_limits_take_the_first_rows(loaded, rows_folder):
    task = Task(kind="lm_eval", corpus="piqa", metrics=["acc"], limit=4)
    config = Config(data_root=str(rows_folder))
    config.tasks.limit = 2
    assert len(run_task("piqa", task, config, Scorer(loaded))) == 2
    assert len(scored_documents(task, config)) == 2


def test_rows_say_what_they_are_not():
    config = Config()
    assert "not the published sample" in (note(Task(kind="token_perplexity", corpus="c4"), config, 501) or "")
    assert note(Task(kind="lm_eval", corpus="wikitext"), config, 62) is None
    config.evaluation.stock_bos = True
    assert "stock" in (note(Task(kind="lm_eval", corpus="wikitext"), config, 62) or "")


@pytest.mark.parametrize(
    ("file", "row", "name", "message"),
    [
        ("winogrande/dev.jsonl", {"sentence": "_", "option1": "x", "option2": "y", "answer": 1}, "winogrande", "line"),
        ("extras/cb_val.jsonl", {"premise": "p", "hypothesis": "h", "label": "maybe", "idx": 0}, "cb", "wrong form"),
        ("extras/piqa_valid.jsonl", {"goal": "g", "sol1": "s"}, "piqa", "lacks the key"),
    ],
)  # fmt: skip
def test_malformed_rows_are_refused_with_their_place(tmp_path, file, row, name, message):
    write(tmp_path / file, [row])
    with pytest.raises(DataError, match=message):
        benchmark_rows(name, tmp_path)


def test_missing_rows_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"task piqa, split validation: no file .*piqa_valid.jsonl"):
        check_benchmark("piqa", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"baber/piqa is not in the local cache.*data_root=DIR"):
        check_benchmark("piqa", None)
    write(tmp_path / "extras/piqa_valid.jsonl", [])
    with pytest.raises(DataError, match="has no rows"):
        benchmark_rows("piqa", tmp_path)
