"""Every property of the contract, measured."""
