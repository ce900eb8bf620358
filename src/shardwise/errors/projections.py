"""Names of the same projection in different models, which LoRA targets are written with."""

from __future__ import annotations

from shardwise.errors import nearest

FAMILIES = (
    "q_proj query wq q to_q q_lin query_proj",
    "k_proj key wk k to_k k_lin key_proj",
    "v_proj value wv v to_v v_lin value_proj",
    "o_proj out_proj wo o to_out out_lin dense",
    "gate_proj w1 gate wi_0 ff_gate",
    "up_proj w3 up wi_1 fc1 c_fc dense_h_to_4h fc_in lin1 wi",
    "down_proj w2 down fc2 c_proj dense_4h_to_h fc_out lin2 ff_out",
    "lm_head embed_out output output_layer head",
    "embed_tokens wte word_embeddings embed_in tok_embeddings",
)
"""Names of the same projection in different models."""
FUSED = {
    "c_attn query_key_value qkv_proj qkv Wqkv in_proj": FAMILIES[:3],
    "gate_up_proj w12": FAMILIES[4:6],
    "c_proj dense": FAMILIES[3:4],
}
"""Names of several projections in one, and of ones that have two meanings."""


def instead(target: str, own: list[str]) -> str:
    """Return this model's name of the projection ``target``, or the nearest names."""
    word = target.rpartition(".")[2]
    families = [family.split() for family in FAMILIES if word in family.split()]
    for fused, parts in FUSED.items():
        if word in fused.split():
            families += [part.split() for part in parts]
        families += [fused.split() for part in parts if word in part.split()]
    same = dict.fromkeys(name for family in families for name in own if name in family)
    if same:
        return f"this model calls it {', '.join(same)}"
    return f"nearest: {', '.join(nearest(word, own))}"
