"""Intervals that contain y for 90 % of rows, by the residuals of held-out rows."""

import torch

torch.manual_seed(0)
x = 4 * torch.rand(1200, 1) - 2
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
train, held_out, test = (x[:400], y[:400]), (x[400:800], y[400:800]), (x[800:], y[800:])


def other_library():
    # start other
    from mapie.regression import SplitConformalRegressor
    from sklearn.neural_network import MLPRegressor

    net = MLPRegressor(hidden_layer_sizes=(50,), solver="lbfgs", max_iter=500, random_state=0)
    net.fit(train[0].numpy(), train[1].numpy().ravel())
    regressor = SplitConformalRegressor(net, confidence_level=0.9, prefit=True)
    regressor.conformalize(held_out[0].numpy(), held_out[1].numpy().ravel())
    _, intervals = regressor.predict_interval(test[0].numpy())
    low, high = torch.as_tensor(intervals[:, :, 0]).unbind(1)
    # end other
    return low, high


def with_bayou():
    # start bayou
    from torch import nn

    import bayou

    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    posterior = bayou.fit(net, train, bayou.MAP(steps=1000, lr=1e-2), progress=False)
    predictor = bayou.conformal(posterior, held_out, 0.9)
    low, high = predictor.interval(posterior.predict(test[0]))
    # end bayou
    return low.squeeze(-1), high.squeeze(-1)
