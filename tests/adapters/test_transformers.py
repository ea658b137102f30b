"""Networks of transformers and peft as they are: batches of a tokenizer, outputs with logits, no wrapper."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayou
from bayou import metrics
from bayou.training.settings import Settings

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # short fits, and warnings of transformers

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TOKENS = torch.randint(1, 20, (24, 6), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.arange(24) % 4 + 3
MASK = (torch.arange(6) < LENGTHS.unsqueeze(1)).long()


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **SIZES)
    return BertForSequenceClassification(config), {
        "input_ids": TOKENS,
        "attention_mask": MASK,
        "labels": TOKENS[:, 0] % 3,
    }


def tagger() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **SIZES)
    labels = (TOKENS % 3).where(MASK == 1, -100)
    return BertForTokenClassification(config), {"input_ids": TOKENS, "attention_mask": MASK, "labels": labels}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    return net, {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS.where(MASK == 1, -100)}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    net = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES))
    return net, {"pixel_values": torch.randn(24, 1, 8, 8), "labels": torch.arange(24) % 3}


NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Tensor]]], bayou.Categorical]] = {
    "bert": (bert, bayou.Categorical()),
    "tagger": (tagger, bayou.Categorical(ignore_index=-100)),
    "gpt2": (gpt2, bayou.Categorical(ignore_index=-100, shift=1)),
    "vit": (vit, bayou.Categorical()),
}
POINT = bayou.MAP(steps=3, lr=1e-3)
METHODS: dict[str, bayou.methods.Method] = {
    "map": POINT,
    "vi": bayou.VI(bayou.MeanField(), steps=2),
    "laplace": bayou.Laplace(where="last", start=POINT),
    "ensemble": bayou.Ensemble(2, POINT, init="keep"),
}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor], bayou.Categorical]:
    torch.manual_seed(0)
    make, likelihood = NETWORKS[name]
    net, batch = make()
    return net.eval(), batch, likelihood


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_networks_are_fitted_as_they_are(name: str, method: str, tmp_path: Path) -> None:
    net, batch, likelihood = built(name)
    posterior = bayou.fit(net, batch, METHODS[method], likelihood=likelihood, progress=False)
    p = posterior.predict(batch, 3, seed=0)
    y = batch["labels"]
    assert p.outputs.shape[1:-1] == y.shape
    assert p.entropy_map.shape == y.shape
    assert bool(p.log_prob(y).isfinite().all())
    assert 0 <= metrics.accuracy(p, y) <= 1
    posterior.save(tmp_path / "a.bayou")
    again = bayou.load(tmp_path / "a.bayou", net).predict(batch, 3, seed=0)
    assert torch.equal(again.outputs, p.outputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_log_likelihood_is_the_loss_of_the_network(name: str) -> None:
    net, batch, likelihood = built(name)
    posterior = bayou.fit(net, batch, bayou.MAP(steps=1, lr=1e-12), likelihood=likelihood, progress=False)
    with torch.no_grad():
        loss = net(**batch).loss  # the mean over the labels that count
    p = posterior.predict(batch)
    counted = p.likelihood.labels(batch["labels"])[1].sum()
    torch.testing.assert_close(-p.log_prob(batch["labels"]).sum() / counted, loss, rtol=1e-4, atol=1e-5)


def test_loaders_of_a_collator_give_padded_batches() -> None:
    net, batch, likelihood = built("gpt2")
    rows = [{key: value[i][: LENGTHS[i]] for key, value in batch.items()} for i in range(24)]

    def collate(some: list[dict[str, Tensor]]) -> Any:
        from transformers import BatchEncoding

        pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        pad = nn.utils.rnn.pad_sequence
        return BatchEncoding({k: pad([row[k] for row in some], True, float(pads[k])) for k in pads})

    loader = DataLoader(rows, 5, shuffle=True, collate_fn=collate)
    posterior = bayou.fit(net, loader, bayou.VI(bayou.MeanField(), steps=6), likelihood=likelihood, progress=False)
    assert posterior.target.n == 24


def test_only_the_adapter_of_peft_is_random() -> None:
    from peft import LoraConfig, get_peft_model

    net, batch, likelihood = built("bert")
    net = get_peft_model(net, LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))
    posterior = bayou.fit(net, batch, bayou.VI(bayou.MeanField(), steps=3), likelihood=likelihood, progress=False)
    random = {name for name, std in posterior.std().items() if bool((std > 0).any())}
    assert random
    assert random <= {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert posterior.predict(batch, 3, seed=0).outputs.shape == (3, 24, 3)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Settings, "total_steps", lambda self, data: 2)
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"torch": torch, "bayou": bayou}
    for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "huggingface.md", "exec"), namespace)
    assert type(namespace["adapted"]).__name__ == "PeftModelForSequenceClassification"


def test_draws_are_networks_of_keywords() -> None:
    net, batch, _ = built("bert")
    bnn = bayou.bayesianize(net, {"classifier*": bayou.MeanField(), "*": bayou.Delta()}, example=batch)
    draw = bnn.draw()
    loss = nn.functional.cross_entropy(draw(**batch), batch["labels"]) + draw.kl / 24
    loss.backward()
    assert draw(**batch).shape == (24, 3)


def test_a_posterior_of_an_adapter_from_fit_to_generation(tmp_path: Path) -> None:
    """Llama with LoRA: fit, entropy by token, a file without the base, and text of one draw."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=20, max_position_embeddings=16, num_key_value_heads=1, **SIZES)
    net = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, task_type="CAUSAL_LM"))
    batch = {"input_ids": TOKENS, "attention_mask": MASK}
    rows = [{name: value[i] for name, value in batch.items()} | {"labels": TOKENS[i]} for i in range(len(TOKENS))]
    posterior = bayou.fit(
        net,
        DataLoader(rows, batch_size=8),
        method=bayou.VI(bayou.MeanField(), epochs=1),
        where="*lora_*",
        likelihood=bayou.Categorical(ignore_index=-100, shift=1),
        progress=False,
    )
    p = posterior.predict(batch, samples=3, seed=0)
    assert p.entropy_map.shape == TOKENS.shape
    posterior.save(tmp_path / "adapter.bayou")
    base = sum(value.numel() for name, value in net.named_parameters() if "lora_" not in name)
    assert (tmp_path / "adapter.bayou").stat().st_size < 4 * base
    again = bayou.load(tmp_path / "adapter.bayou", net)
    assert torch.equal(again.predict(batch, samples=3, seed=0).outputs, p.outputs)
    text: Any = again.to_module(seed=0)
    assert text.generate(input_ids=TOKENS[:2, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)


def test_the_last_layer_of_a_trained_network() -> None:
    net, batch = vit()
    rows = [{name: value[i] for name, value in batch.items()} for i in range(24)]
    method = bayou.Laplace(where="last", start=None)
    posterior = bayou.fit(net, DataLoader(rows, batch_size=8), method=method, progress=False)
    assert posterior.predict({"pixel_values": batch["pixel_values"]}).mutual_information.shape == (24,)
