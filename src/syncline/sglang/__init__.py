"""An unmodified SGLang server follows a trainer: a client of its routes, and what runs inside its ranks.

From outside: `versions` says how a release wants to be updated, `control` speaks its routes, `commit` is the
order of an update, `change` the ways to put weights in, `routes` which of them is taken, `proved` what is loaded,
`mirror` the checkpoint directory that goes ahead of the server, `standing` whether a server
still serves what it was brought to, `server` an engine that a `syncline.serving.Replica` can keep on a store.

In the ranks, through SGLang's `--custom-weight-loader`: `worker` obeys the orders in a staging directory
(`staged`), `live` writes changes into SGLang's fused parameters in O(changes).

Nothing here imports SGLang before it is used.
"""
