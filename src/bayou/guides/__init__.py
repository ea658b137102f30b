"""Guides: trainable distributions over the named tensors of a network."""

from bayou.guides.dropout import Dropout
from bayou.guides.gaussian import Delta, LowRank, MeanField, SparseVD
from bayou.guides.groups import HalfCauchy, NormalJeffreys
from bayou.guides.guide import KL, Draw, Gain, Guide, GuideSpec, Weight
from bayou.guides.implicit import SIVI, UIVI
from bayou.guides.inducing import Inducing
from bayou.guides.joint import JointFlow
from bayou.guides.multiplicative import MNF
from bayou.guides.nodes import NodeFlow, NodeNoise, RankOne

__all__ = [
    "KL",
    "MNF",
    "SIVI",
    "UIVI",
    "Delta",
    "Draw",
    "Dropout",
    "Gain",
    "Guide",
    "GuideSpec",
    "HalfCauchy",
    "Inducing",
    "JointFlow",
    "LowRank",
    "MeanField",
    "NodeFlow",
    "NodeNoise",
    "NormalJeffreys",
    "RankOne",
    "SparseVD",
    "Weight",
]
