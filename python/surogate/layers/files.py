"""Names of tensors in published models of several parts."""

from __future__ import annotations

#: As transformers 4 wrote them, and as the modules of transformers 5 are called.
VISION_RENAMED = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

#: The same with SigLIP's tower, which published files have one level deeper.
SIGLIP_RENAMED = {"vision_tower.vision_model.": "model.vision_tower.", **VISION_RENAMED}

#: Parts that are not computed.
VISION_CARRIED = ["model.vision_tower.", "model.multi_modal_projector."]
