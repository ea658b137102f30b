"""Old names: ``bayou.lab`` is now ``bayou.data``, ``adapters``, ``operations``, ``report``, ``runs`` and ``cli``."""
