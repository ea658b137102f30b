# %% [markdown]
# # transformers' Trainer: a posterior over adapters
#
# The base is in bfloat16 and frozen; the adapters of peft are trained in float32, and their B matrices are random. Two
# batches are accumulated for a step. The network is made from a config, so that this page needs no download;
# `from_pretrained` works the same.

# %%
import tempfile
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import bayou

warnings.filterwarnings("ignore", "mkldnn_matmul")  # of a processor without bfloat16
RULES = {
    "*lora_B*": bayou.MeanField(0.1),
    "*": bayou.Delta(),
}  # B starts at 0, so that it has a prior around 0
ids = torch.randint(
    1, 30, (96, 8), generator=torch.Generator().manual_seed(0)
)  # sentences of words 1 to 29
rows = [
    {"input_ids": row, "labels": row[0] // 10} for row in ids
]  # the class is that of the first word
batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    net = BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, **sizes)).to(
        torch.bfloat16
    )
    return get_peft_model(
        net, LoraConfig(r=4, target_modules=["query", "value", "classifier"])
    )  # in float32


# %% [markdown]
# ## One method of a Trainer
#
# `compute_loss` returns −log-likelihood + KL/N; the model is what `bayesianize` returns.


# %%
class VITrainer(Trainer):
    losses = []

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        self.model_accepts_loss_kwargs = (
            False  # a mean: the Trainer divides it by the number of batches of a step
        )
        logits, kl = model(**inputs)
        nll = F.cross_entropy(logits.float(), inputs["labels"])
        self.losses.append(nll.item())
        loss = nll + kl / len(self.train_dataset)
        return (loss, {"logits": logits}) if return_outputs else loss


with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder, max_steps=80, per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=3e-2,
        report_to=[], logging_strategy="no", save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    bnn = bayou.bayesianize(network(), RULES, prior=bayou.Normal(0.3), example=batch)
    VITrainer(bnn, settings, train_dataset=rows).train()
    bnn.posterior(bayou.Categorical(), len(rows)).save(f"{folder}/words.bayou")
    posterior = bayou.load(f"{folder}/words.bayou", network())

# %% [markdown]
# ## Predict
#
# A dict of inputs goes to the network as keyword arguments.

# %%
p = posterior.predict({"input_ids": batch["input_ids"]}, 20, seed=0)
right = bayou.metrics.accuracy(p, batch["labels"])
print(f"accuracy {right:.1%}, mutual information {p.mutual_information.mean():.3f} nats")
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8.5, 3),
    layout="compressed",
    num="NLL over batches of the Trainer, and probabilities of the right class by draw",
)
axes[0].plot(VITrainer.losses, color="#3b5b92", linewidth=0.8)
axes[0].set(xlabel="batch", ylabel="NLL, nats")
right = p.means[:, torch.arange(96), batch["labels"]]
axes[1].boxplot(right[:, :15].float().numpy(), whis=(0, 100), medianprops={"color": "#d9743c"})
axes[1].set(xlabel="sentence", ylabel="p(right class)", ylim=(0, 1))
plt.show()
