"""Keys of configurations that earlier versions had."""

GONE: dict[str, str] = {
    "data.max_damaged": "replacing damaged images; delete the file that the error names",
    "data.verify": "the background check of data; use `polyad data verify`",
    "monitor.stall_minutes": "the watchdog; parallel.timeout_minutes ends a run that stalls",
    "monitor.stragglers": "the search for slow processes",
    "monitor.max_rewinds": "rewinding; use `monitor.spike_action: skip`",
    "parallel.expert_overlap": "the overlap of experts with their exchange; leave it out",
    "expert_keys": "attentive scores of sparse experts; use `score: linear`",
    "softmax_share": "gates that begin as softmax; gate: softmax or entmax15 is for the whole run",
    **dict.fromkeys(
        ("model.expert.kind", "model.gate_network.kind"),
        "ViTs and Mixers as experts of a mixture; leave it out, each expert is a small network",
    ),
    **dict.fromkeys(
        ("allow_leak", "causal_graph"),
        "runs that see later tokens; language models are causal, and other models were never asked",
    ),
    "model.output": "mixtures of logits; leave it out, probabilities are mixed",
    "model.feed_forward.experts": "other ways to compute experts; leave it out",
    "capacity_order": "priority; a capacity keeps the first tokens",
    "graph_from": "graphs that start late; a graph is on from the first step",
    "input_jitter": "noise on experts' inputs; use `router_noise`",
    "lower_entropy_only": "graphs of decided tokens alone; a graph has all tokens up to this one",
    **dict.fromkeys(
        ("loss.erc", "loss.erc_alpha", "loss.erc_noise", "loss.orthogonality", "loss.variance"),
        "the losses on what experts compute; use loss.load_balance, importance or router_z",
    ),
    "study.question": "the page of a study; write a comment",
    "study.not_shown": "the page of a study; write a comment",
    "study.data": "preparing by a study; set data.path under common and run `polyad prepare`",
    "study.from_runs": "its names; write FOLDER/runs/VARIANT/seed-{seed} as the variant's value",
    "study.attack": "measures of a study; use `polyad evaluate RUN --attack`",
    "study.leak": "measures of a study",
    "study.knockout": "measures of a study; use `polyad experts atlas RUN`",
    "study.specialization": "measures of a study; use `polyad experts specialize RUN`",
    "study.measures": "measures of a study; use `polyad experts splice RUN`",
}
"""By dotted key or its last part: what it went with, and what to use instead, as in "rewinding; use
`skip`". Keys of a study's file begin with `study.`"""
