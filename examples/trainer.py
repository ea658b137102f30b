"""Transformers' Trainer trains a variational posterior of adapters; then a folder of it.

The base is in bfloat16 and frozen; the adapters of peft are trained, in float32. Two batches are accumulated for a
step: the loss of a batch is a mean over its rows plus KL/N, so that the mean over batches is that of a larger one.
Needs transformers and peft: networks here are made from a config, ``from_pretrained`` works the same.

    python examples/trainer.py --steps 200
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import bayou

RULES = {"*lora_B*": bayou.MeanField(0.1), "*": bayou.Delta()}  # B starts at 0, so that it has a prior around 0


def rows(n: int = 96, length: int = 8) -> list[dict[str, Tensor]]:
    """Sentences of words 1 to 29; the class is that of the first word."""
    ids = torch.randint(1, 30, (n, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row[0] // 10} for row in ids]


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    net = BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, **sizes)).to(torch.bfloat16)
    return get_peft_model(net, LoraConfig(r=4, target_modules=["query", "value", "classifier"]))  # in float32


class VITrainer(Trainer):
    """Minimizes −log-likelihood + KL/N; the model is what ``bayesianize`` returns."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        self.model_accepts_loss_kwargs = False  # a mean: the Trainer divides it by the number of batches of a step
        logits, kl = model(**inputs)
        loss = F.cross_entropy(logits.float(), inputs["labels"]) + kl / len(self.train_dataset)
        return (loss, {"logits": logits}) if return_outputs else loss


def settings(folder: str, steps: int) -> TrainingArguments:
    return TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=3e-2,
        report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip


def main(steps: int = 200) -> float:
    data, likelihood = rows(), bayou.Categorical()
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    with tempfile.TemporaryDirectory() as folder:
        bnn = bayou.bayesianize(network(), RULES, prior=bayou.Normal(0.3), example=batch)
        VITrainer(bnn, settings(folder, steps), train_dataset=data).train()
        bnn.save_pretrained(f"{folder}/bnn")
        posterior = bayou.guides.Bayesian.from_pretrained(f"{folder}/bnn", network()).posterior(likelihood, len(data))
    p = posterior.predict({"input_ids": batch["input_ids"]}, 20, seed=0)
    accuracy = float((p.mean.argmax(-1) == batch["labels"]).float().mean())
    print(f"accuracy {accuracy:.1%}, mutual information {p.mutual_information.mean():.3f} nats")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
