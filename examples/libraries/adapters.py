# %% [markdown]
# # Hugging Face: uncertainty of a low-rank adapter
#
# A transformer with LoRA adapters of peft is trained as usual. Then, without further training, its adapters become
# random: by Laplace (Yang 2024) or by TFB, the largest variance that held-out rows tolerate (Shi 2024). The base is
# shared, never copied. The network is made from a config, so that this page needs no download.

# %%
import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import bayou

# The class of a sentence is that of its first word; words 9 to 11 never come first in training.
generator = torch.Generator().manual_seed(0)
ids = torch.randint(1, 12, (360, 8), generator=generator)
ids[:, 0] = torch.randint(1, 9, (360,), generator=generator)
labels = (ids[:, 0] > 4).long()
train, held, test = (
    {"input_ids": ids[k : k + 120], "labels": labels[k : k + 120]} for k in (0, 120, 240)
)
strange = test["input_ids"].clone()
strange[:, 0] = torch.randint(9, 12, (120,), generator=generator)

torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
base = BertForSequenceClassification(
    BertConfig(vocab_size=12, num_labels=2, hidden_dropout_prob=0.0, **sizes)
)
net = get_peft_model(
    base, LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
)

# %% [markdown]
# ## Train the adapter, then make it random

# %%
point = bayou.fit(net, train, bayou.MAP(steps=200, lr=1e-2), progress=False)
trained = point.to_module()
posteriors = {
    "point": point,
    "TFB": bayou.fit(trained, held, bayou.methods.TFB(start=None), where="*lora_*", progress=False),
    "Laplace": bayou.fit(trained, held, bayou.Laplace(start=None), where="*lora_*", progress=False),
}
entropies = {}
for name, posterior in posteriors.items():
    p, q = (
        posterior.predict({"input_ids": rows}, 30, seed=0) for rows in (test["input_ids"], strange)
    )
    entropies[name] = p.entropy, q.entropy
    score, area = bayou.metrics.nll(p, test["labels"]), bayou.metrics.auroc(p.entropy, q.entropy)
    right = bayou.metrics.accuracy(p, test["labels"])
    print(f"{name:8s} accuracy {right:.1%}, NLL {score:.3f}, AUROC of strange words {area:.2f}")

# %% [markdown]
# ## Sentences with a first word that was never seen there
#
# The entropy of known and of strange sentences, whose first word was never the first one in training. The network is
# already less sure of them. The variances that held-out rows select for its adapters are small, and hardly change its
# predictions.

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10, 2.8),
    sharey=True,
    layout="compressed",
    num="Histograms of the entropy of known and strange sentences for three posteriors",
)
for axis, (name, (known, other)) in zip(axes, entropies.items(), strict=True):
    for values, label, color in ((known, "known", "#3b5b92"), (other, "strange", "#d9743c")):
        axis.hist(values, bins=20, range=(0, 0.7), alpha=0.6, color=color, label=label)
    axis.set(title=name, xlabel="entropy, nats")
axes[0].set_ylabel("sentences")
axes[0].legend(frameon=False)
plt.show()
