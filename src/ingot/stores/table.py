"""The table of schemes: the addresses that stores have, and the classes that open them.

A new store (an object store, a hub) is a module with a ``Scheme`` and a line here. Plugins add schemes by entry points
in the group ``ingot.stores``; the name of an entry is the scheme of its addresses.
"""

from __future__ import annotations

from ingot.core.registry import Instances
from ingot.stores.scheme import Scheme

STORES: Instances[Scheme] = Instances(
    "store",
    (
        ("file", "ingot.stores.local_scheme:LocalScheme"),
        ("memory", "ingot.stores.memory:MemoryScheme"),
        ("https", "ingot.stores.remote.hub:HttpsScheme"),
        ("http", "ingot.stores.remote.store:WebScheme"),
        ("s3", "ingot.stores.remote.store:ObjectScheme"),
        ("gs", "ingot.stores.remote.store:GoogleScheme"),
        ("az", "ingot.stores.remote.store:AzureScheme"),
        ("hf", "ingot.stores.remote.hub:HubScheme"),
    ),
    group="ingot.stores",
    contract=Scheme,
)
