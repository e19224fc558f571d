"""`dejavu doctor`: what is here, what is missing and what would bring it."""

import pytest
from rows import data_folder

from dejavu.schema import Config, Corpus, Model, Task
from dejavu.stages import doctor


def states(config: Config) -> dict[str, str]:
    return {finding.what: finding.state for finding in doctor.findings(config)}


def tasks(**run: Task) -> Config:
    config = Config()
    config.tasks.run = run
    return config


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "empty"))


def test_the_embedded_default_needs_nothing(capsys):
    assert doctor.diagnose(tasks(pydocs=Task())) == 0
    shown = capsys.readouterr().out
    assert "in this package" in shown and "torch" in shown and "near 27.7" in shown


def test_local_data_is_found_and_what_is_not_is_named(tmp_path, capsys):
    config = tasks(
        piqa=Task(kind="lm_eval", corpus="piqa", metrics=["acc"]),
        c4_token=Task(kind="token_perplexity", corpus="c4"),
    )
    config.corpus = Corpus(name="mixture")
    config.data_root = str(data_folder(tmp_path / "data"))
    assert set(states(config).values()) == {doctor.HERE}
    (tmp_path / "data" / "extras" / "piqa_valid.jsonl").unlink()
    assert states(config)["task piqa"] == doctor.MISSING
    config.data_root = None
    assert set(states(config).values()) == {doctor.HERE, doctor.MISSING}
    assert doctor.diagnose(config) == 1
    assert "data_root=DIR" in capsys.readouterr().out


def test_models_and_what_brings_them(tmp_path):
    def state(**model) -> tuple[str, str]:
        finding = doctor.model_finding(Config(model=Model(**{"name": "x", **model})))
        return finding.state, finding.where

    assert state(random_init=True)[0] == doctor.HERE
    assert state(path=str(tmp_path))[0] == doctor.MISSING
    assert state()[0] == doctor.MISSING
    hub_state, remedy = state(hub="nobody/has-this")
    assert hub_state == doctor.MISSING and "fetch=true" in remedy and "model.path=DIR" in remedy
    packaged, remedy = state(package="no-such-package", gguf="x.gguf")
    assert packaged == doctor.MISSING and "make smollm2" in remedy


def test_fetch_brings_what_is_missing_and_tells_what_it_cannot(monkeypatch, capsys):
    there = []

    def finding(config):
        yield doctor.Finding("model x", doctor.HERE if there else doctor.MISSING, "somewhere", lambda: there.append(1))
        yield doctor.Finding("task y", doctor.MISSING, "nowhere", lambda: 1 / 0)

    monkeypatch.setattr(doctor, "findings", finding)
    config = Config()
    config.fetch = True
    assert doctor.diagnose(config) == 1
    shown = capsys.readouterr().out
    assert there == [1] and "task y could not be fetched (ZeroDivisionError" in shown
