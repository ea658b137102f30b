"""Methods beside a public HMC run of a ResNet-20 on CIFAR-10
(Izmailov et al. 2021).

Every fit leaves its predictions in a file of ``OUT/hmc-cifar10/``, so that it is made once:
ensembles and several chains are means of such files, and methods that begin at a point take its
weights from there.
"""

from experiments.hmc_cifar.table import HMCCifar

__all__ = ["HMCCifar"]
