"""Keys of configurations that earlier versions had."""

GONE: dict[str, str] = {
    "expert_keys": "attentive scores of sparse experts; use `score: linear`",
    "softmax_share": "gates that begin as softmax; gate: softmax or entmax15 is for the whole run",
    **dict.fromkeys(
        ("loss.erc", "loss.erc_alpha", "loss.erc_noise", "loss.orthogonality", "loss.variance"),
        "the losses on what experts compute; use loss.load_balance, importance or router_z",
    ),
}
"""By dotted key or its last part: what it went with, and what to use instead, as in "rewinding; use
`skip`"."""
