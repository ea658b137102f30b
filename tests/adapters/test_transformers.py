"""Networks of transformers and peft as they are: batches of a tokenizer, outputs with logits, no
wrapper.
"""

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
from bayou.posteriors import FileError
from bayou.training.settings import Settings

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),
]  # short fits, and warnings of transformers

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
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
    return BertForTokenClassification(config), {
        "input_ids": TOKENS,
        "attention_mask": MASK,
        "labels": labels,
    }


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    return net, {
        "input_ids": TOKENS,
        "attention_mask": MASK,
        "labels": TOKENS.where(MASK == 1, -100),
    }


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    net = ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES)
    )
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
    posterior = bayou.fit(
        net, batch, bayou.MAP(steps=1, lr=1e-12), likelihood=likelihood, progress=False
    )
    with torch.no_grad():
        loss = net(**batch).loss  # the mean over the labels that count
    p = posterior.predict(batch)
    counted = p.likelihood.labels(batch["labels"])[1].sum()
    torch.testing.assert_close(
        -p.log_prob(batch["labels"]).sum() / counted, loss, rtol=1e-4, atol=1e-5
    )


def test_loaders_of_a_collator_give_padded_batches() -> None:
    net, batch, likelihood = built("gpt2")
    rows = [{key: value[i][: LENGTHS[i]] for key, value in batch.items()} for i in range(24)]

    def collate(some: list[dict[str, Tensor]]) -> Any:
        from transformers import BatchEncoding

        pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        pad = nn.utils.rnn.pad_sequence
        return BatchEncoding({k: pad([row[k] for row in some], True, float(pads[k])) for k in pads})

    loader = DataLoader(rows, 5, shuffle=True, collate_fn=collate)
    posterior = bayou.fit(
        net, loader, bayou.VI(bayou.MeanField(), steps=6), likelihood=likelihood, progress=False
    )
    assert posterior.target.n == 24


def test_only_the_adapter_of_peft_is_random() -> None:
    from peft import LoraConfig, get_peft_model

    net, batch, likelihood = built("bert")
    net = get_peft_model(
        net, LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    )
    posterior = bayou.fit(
        net, batch, bayou.VI(bayou.MeanField(), steps=3), likelihood=likelihood, progress=False
    )
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
    bnn = bayou.bayesianize(
        net, {"classifier*": bayou.MeanField(), "*": bayou.Delta()}, example=batch
    )
    draw = bnn.draw()
    loss = nn.functional.cross_entropy(draw(**batch), batch["labels"]) + draw.kl / 24
    loss.backward()
    assert draw(**batch).shape == (24, 3)


PROMPT = {"input_ids": TOKENS[:2, :3], "attention_mask": torch.ones(2, 3).long()}
NEXT_TOKEN = bayou.Categorical(ignore_index=-100, shift=1)


def llama(rank: int = 8, **sizes: int) -> tuple[nn.Module, DataLoader[Any], dict[str, Tensor]]:
    """Llama with LoRA, a loader of its rows, and all rows without labels."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, max_position_embeddings=16, num_key_value_heads=1, **SIZES | sizes
    )
    net = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=rank, task_type="CAUSAL_LM"))
    batch = {"input_ids": TOKENS, "attention_mask": MASK}
    labels = TOKENS.where(MASK == 1, -100)
    rows = [
        {name: value[i] for name, value in batch.items()} | {"labels": labels[i]}
        for i in range(len(TOKENS))
    ]
    return net, DataLoader(rows, batch_size=8), batch


def generated(posterior: bayou.Posterior) -> Tensor:
    """Five tokens of one draw of the network, three of them given."""
    text: Any = posterior.to_module(seed=0)
    found: Tensor = text.generate(**PROMPT, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    return found


def test_a_posterior_of_an_adapter_from_fit_to_generation(tmp_path: Path) -> None:
    """Llama with LoRA: fit, entropy by token, a file without the base, and text of one draw."""
    net, loader, batch = llama()
    posterior = bayou.fit(
        net,
        loader,
        method=bayou.VI(bayou.MeanField(), epochs=3),
        where="*lora_*",
        likelihood=NEXT_TOKEN,
        progress=False,
    )
    p = posterior.predict(batch, samples=10, seed=0)
    assert p.entropy_map.shape == TOKENS.shape
    posterior.save(tmp_path / "adapter.bayou")
    again = bayou.load(tmp_path / "adapter.bayou", net)
    assert torch.equal(again.predict(batch, samples=10, seed=0).outputs, p.outputs)
    assert generated(again).shape == (2, 5)
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    with pytest.raises(
        FileError, match="with other values of .*1 of 21 frozen tensors differ.*load the base first"
    ):
        bayou.load(tmp_path / "adapter.bayou", net)


def test_a_trained_adapter_has_the_spread_that_anchor_rows_tolerate(tmp_path: Path) -> None:
    """TFB without gradients: the bound of its NLL, a file of its numbers alone, and text of one
    draw.
    """
    net, loader, batch = llama(rank=64, hidden_size=128)
    options: dict[str, Any] = {"where": "*lora_*", "likelihood": NEXT_TOKEN, "progress": False}
    point = bayou.fit(net, loader, bayou.MAP(steps=20, lr=1e-2), **options)
    trained = point.to_module()
    method = bayou.methods.TFB(start=None, tolerance=0.01, samples=4)
    posterior = bayou.fit(trained, loader, method, **options)
    labels = TOKENS.where(MASK == 1, -100)
    before, after = (
        -float(p.predict(batch, p.draws or 4, seed=0).log_prob(labels).sum()) / 24
        for p in (point, posterior)
    )
    found = posterior.history[-1]
    assert found["point_nll"] == pytest.approx(before, rel=1e-4)
    assert found["point_nll"] < found["anchor_nll"] <= 1.01 * before
    assert after < 1.1 * before  # other draws than those of the search
    posterior.save(tmp_path / "adapter.bayou")
    free = {name: value.numel() for name, value in net.named_parameters() if "lora_" in name}
    numbers = sum(free.values()) + sum(
        count for name, count in free.items() if "lora_A" in name
    )  # a std for every A
    assert 4 * numbers < (tmp_path / "adapter.bayou").stat().st_size < 1.1 * 4 * numbers
    again = bayou.load(tmp_path / "adapter.bayou", trained)
    assert torch.equal(generated(again), generated(posterior))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            {},
            {"where": "*lora_C*"},
            r"pattern '\*lora_C\*' matches no name; the names are 'base_model",
        ),
        (
            {},
            {"where": "last"},
            r"where='last' selects .*lm_head.weight, and .*lm_head.weight' is frozen; unfreeze it",
        ),
        (
            {"labels": torch.full((6,), 20)},
            {},
            "y must lie in 0 .. 19 for 20 classes, got 20 .. 20; count the classes",
        ),
        (
            {"labels": None},
            {},
            "a batch with the keys input_ids, attention_mask has no labels; give them the key",
        ),
    ],
)
def test_bad_input_of_an_adapter_is_a_sentence(
    rows: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    net, loader, _ = llama()
    given: Any = loader.dataset
    changed = [
        {key: value for key, value in (row | rows).items() if value is not None} for row in given
    ]
    options = {"where": "*lora_*", "likelihood": NEXT_TOKEN, "progress": False} | options
    with pytest.raises(ValueError, match=message):
        bayou.fit(
            net, DataLoader(changed, batch_size=8), bayou.VI(bayou.MeanField(), epochs=1), **options
        )
