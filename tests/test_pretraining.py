"""How opt-tiny is made: reading order, resuming, and what the card says of the weights that are there."""

import json

import numpy as np
import pytest
import torch

from dejavu.corpora.documents import Document
from dejavu.errors import DataError
from dejavu.models import EMBEDDED
from dejavu.models.load import load_model
from dejavu.pretraining.card import HeldOut, active_shares, model_card
from dejavu.pretraining.data import BlockStream
from dejavu.pretraining.fit import fit
from dejavu.pretraining.module import CausalLM
from dejavu.pretraining.muon import Muon, orthogonalised
from dejavu.pretraining.tokenizer import train_tokenizer
from dejavu.schema import Config, Pretrain, Trainer

VOCABULARY = 64


def documents(count: int = 40) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [
        np.array([2, *random.integers(4, VOCABULARY, random.integers(5, 60))], dtype=np.int32) for _ in range(count)
    ]


def small() -> Config:
    shape = Pretrain(hidden=16, layers=1, heads=2, ffn=32, positions=32, vocabulary=VOCABULARY)
    return Config(pretrain=shape, trainer=Trainer(batch_tokens=64, max_steps=8, checkpoint_steps=3, warmup_steps=2))


def test_the_order_of_reading_depends_on_seed_and_step_only():
    whole = iter(BlockStream(documents(), 32, 2, seed=1))
    batches = [next(whole) for _ in range(60)]  # more than one epoch
    late = iter(BlockStream(documents(), 32, 2, seed=1, start=45))
    assert all(torch.equal(batches[45 + index], next(late)) for index in range(15))
    assert not torch.equal(batches[0], next(iter(BlockStream(documents(), 32, 2, seed=2))))
    with pytest.raises(ValueError, match="fewer than one batch"):
        next(iter(BlockStream(documents(1), 32, 2, seed=1)))


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    whole = fit(small(), documents(), documents(10), VOCABULARY, tmp_path / "whole", [])
    step = CausalLM.training_step

    def killed(self, tokens_BT):
        if self.global_step == 5:
            raise KeyboardInterrupt
        return step(self, tokens_BT)

    monkeypatch.setattr(CausalLM, "training_step", killed)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(small(), documents(), documents(10), VOCABULARY, tmp_path / "killed", [])
    monkeypatch.undo()
    resumed = fit(small(), documents(), documents(10), VOCABULARY, tmp_path / "killed", [])
    for (name, expected), found in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found), name


@pytest.mark.parametrize("columns", [24, 40, 96])
def test_muons_updates_have_singular_values_near_one(columns):
    """Whatever they were before, within a factor of twenty; both ways of computing it."""
    left, _ = torch.linalg.qr(torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(0)))
    right, _ = torch.linalg.qr(torch.randn(3, columns, 24, generator=torch.Generator().manual_seed(1)))
    values = torch.logspace(-1.3, 0, 24)
    update = orthogonalised(left * values @ right.mT)
    found = torch.linalg.svdvals(update)
    assert float(found.min()) > 0.6 and float(found.max()) < 1.3
    torch.testing.assert_close(torch.linalg.det(update @ right @ left.mT).sign(), torch.ones(3))  # same directions


def test_muon_moves_matrices_by_its_rate_and_decays_what_it_should():
    torch.manual_seed(0)
    matrix, bias = torch.nn.Parameter(torch.randn(8, 16)), torch.nn.Parameter(torch.randn(16))
    other = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = Muon([matrix], [other], [bias], lr=0.1, weight_decay=0.5)
    before = matrix.detach().clone(), bias.detach().clone(), other.detach().clone()
    matrix.grad, bias.grad, other.grad = torch.randn(8, 16), torch.randn(16), torch.randn(4, 4)
    optimizer.step()
    moved = matrix.detach() - before[0] * (1 - 0.1 * 0.5)
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=0.35)
    torch.testing.assert_close(bias.detach(), before[1] - 0.1 * bias.grad.sign(), atol=1e-3, rtol=0)
    decayed = before[2] * (1 - 0.1 * 0.5) - 0.1 * other.grad.sign()
    torch.testing.assert_close(other.detach(), decayed, atol=1e-3, rtol=0)


def test_held_out_text_shorter_than_a_block_is_refused(tmp_path):
    with pytest.raises(DataError, match="shorter than one block"):
        fit(small(), documents(), [np.array([2, 5], dtype=np.int32)], VOCABULARY, tmp_path, [])


def test_the_tokenizer_has_opts_special_tokens_in_opts_order():
    tokenizer = train_tokenizer(["the quick brown fox " * 20, "naïve café"], 300, 32)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<s>", "<pad>", "</s>", "<unk>"]
    assert tokenizer("fox")["input_ids"][0] == 2 and tokenizer.pad_token_id == 1 and tokenizer.eos_token_id == 2
    text = "any text, naïve or not: 日本"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_active_shares_equal_a_direct_count():
    loaded = load_model(Config())
    texts = [Document("The module defines classes for reading and writing files. " * 4, "t")]
    ids = torch.tensor([loaded.tokenizer(texts[0].text)["input_ids"]])
    counted = []
    fc1 = loaded.model.model.decoder.layers[2].fc1
    hook = fc1.register_forward_hook(lambda module, args, output: counted.append((output[:-1] > 0).float().mean()))
    loaded.model(input_ids=ids)
    hook.remove()
    assert active_shares(texts, loaded)[2] == pytest.approx(float(counted[0]), abs=1e-6)


def test_the_card_holds_what_was_measured():
    card = model_card({"hidden": 16}, {"seed": 0}, [HeldOut("c", "h", 3, 1000, 1.5, 1.25)], [0.25, 0.5])
    assert "| c | 3 | 1,000 | 1.5000 | 1.2500 | h |" in card and "25.0%, 50.0%" in card and "- hidden: 16" in card


def test_the_embedded_weights_are_the_cards():
    folder = EMBEDDED / "opt-tiny"
    assert f"fingerprint: {load_model(Config()).fingerprint}" in (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert (folder / "model.safetensors").stat().st_size < 13_000_000
