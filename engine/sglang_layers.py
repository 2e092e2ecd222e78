"""What SGLang's attention layers ask for beyond plain causal attention, by what they say of themselves."""

from __future__ import annotations

from typing import Any


def unsupported(layers: list[Any], config: Any, context_tokens: int) -> set[str]:
    """What SGLang's attention layers, or the model's config, ask for beyond plain causal attention."""
    asked = {reason for layer in layers for reason in [layer_problem(layer, context_tokens)] if reason}
    window = getattr(config, "sliding_window", None)
    everywhere = getattr(config, "use_sliding_window", True) and not hasattr(config, "layer_types")
    if window and everywhere and window < context_tokens:  # some of SGLang's classes leave it out: their answers are not the model's own
        asked.add(f"a sliding window of {window} tokens (the context is {context_tokens})")
    return asked


def layer_problem(layer: Any, context_tokens: int) -> str | None:
    """How a RadixAttention layer differs from plain causal attention; None if it does not. A window as wide as the context is none."""
    if layer.qk_head_dim != layer.v_head_dim:
        return f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim} elements"
    if layer.logit_cap:
        return f"scores capped at {layer.logit_cap}"
    if 0 <= layer.sliding_window_size < context_tokens - 1:
        return f"a sliding window of {layer.sliding_window_size + 1} tokens (the context is {context_tokens})"
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        return "more than causal self-attention"
    if layer.use_irope or layer.pos_encoding_mode != "NONE" or layer.xai_temperature_len > 0:
        return "scores that change with the position"
    return None
