"""A module that cannot be imported."""

raise ImportError("InjectedFault: import")
