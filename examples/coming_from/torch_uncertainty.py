"""An ensemble of networks, and the entropy of its averaged probabilities."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(300, 2)
y = (x.square().sum(1) > 1.4).long()
x_new = torch.tensor([[0.0, 0.0], [3.0, 0.0], [1.18, 0.0]])


def other_library():
    # start other
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.models import deep_ensembles
    from torch_uncertainty.routines import ClassificationRoutine

    def network():
        return nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))

    ensemble = deep_ensembles([network() for _ in range(5)])
    routine = ClassificationRoutine(
        ensemble,
        num_classes=2,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=True,
        optim_recipe=torch.optim.Adam(ensemble.parameters(), lr=1e-2),
    )
    trainer = TUTrainer(max_epochs=50, logger=False, enable_checkpointing=False)
    trainer.fit(routine, DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True))
    logits = ensemble(x_new)  # (members · rows, classes)
    probabilities = logits.softmax(-1).unflatten(0, (5, -1)).mean(0)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    # end other
    return probabilities.detach(), entropy.detach()


def with_bayou():
    # start bayou
    import bayou

    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))
    method = bayou.Ensemble(5, bayou.MAP(steps=150, batch_size=100, lr=1e-2))
    posterior = bayou.fit(net, (x, y), method, progress=False)
    p = posterior.predict(x_new)
    probabilities, entropy = p.mean, p.entropy
    # end bayou
    return probabilities, entropy
