"""A live vLLM follows a trainer: what runs in its workers, and what drives them from outside.

In the workers: `plugin` registers the weight-transfer engine `syncline` (`engine`), or `extension` adds the
same methods to any worker; both drive one `session`, which keeps a copy of the weights in the host's memory
(`copy`), brings it to a version while generation goes on, and only then changes the live weights. Workers
agree on every step (`ranks`): all of them take a version or none does.

From outside: `commit` is the order of the steps around the change, `control` how a vLLM is told them, and
`server` an engine that a `syncline.serving.Replica` can keep on a store.

Nothing here imports vLLM before it is used.
"""
