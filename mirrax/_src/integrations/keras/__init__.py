"""Keras in a scope: imported as soon as a scope is entered and Keras is there.

`fit` is Keras' own program, split by the batch (`training`); in replicas a Keras variable is
an `mx.Variable` (`variables`, `parts`). All private names of Keras are in `private`.
"""

from __future__ import annotations

from mirrax._src.integrations.keras import private

if private.is_usable():
    from mirrax._src.integrations.keras import data, files, parts, training, variables

    for module in (variables, parts, training, data, files):
        module.install()
else:
    private.refuse_variables()
