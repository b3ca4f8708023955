"""Published models whose config.json names a known architecture, by that architecture: names that do not say what they are."""

from __future__ import annotations

#: By the name in `architectures`; the examples of the architectures are not repeated.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": ("deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct", "deepseek-ai/DeepSeek-V2.5"),
    "DeepseekV3ForCausalLM": ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.1", "moonshotai/Kimi-K2-Instruct"),
    "Ernie4_5_MoeForCausalLM": ("baidu/ERNIE-4.5-21B-A3B-Thinking",),
    "Gemma3ForCausalLM": ("google/medgemma-27b-text-it",),
    "Gemma3ForConditionalGeneration": ("google/medgemma-4b-it",),
    "Glm4ForCausalLM": ("zai-org/GLM-Z1-9B-0414", "zai-org/GLM-Z1-32B-0414"),
    "Glm4MoeForCausalLM": ("zai-org/GLM-4.6", "zai-org/GLM-4.7"),
    "LlamaForCausalLM": (
        "openbmb/MiniCPM5-1B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai/deepseek-coder-6.7b-instruct",
        "deepseek-ai/deepseek-llm-7b-chat",
        "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF",
        "01-ai/Yi-1.5-9B-Chat",
        "01-ai/Yi-Coder-9B-Chat",
        "Infinigence/Megrez-3B-Instruct",
    ),
    "MiniMaxM2ForCausalLM": ("MiniMaxAI/MiniMax-M2.1", "MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.7"),
    "Mistral3ForConditionalGeneration": ("mistralai/Mistral-Small-3.1-24B-Instruct-2503",),
    "MistralForCausalLM": (
        "mistralai/Mistral-Nemo-Instruct-2407",
        "mistralai/Ministral-8B-Instruct-2410",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        "mistralai/Codestral-22B-v0.1",
        "mistralai/Devstral-Small-2505",
        "HuggingFaceH4/zephyr-7b-beta",
    ),
    "MixtralForCausalLM": ("alpindale/WizardLM-2-8x22B",),
    "Phi3ForCausalLM": ("microsoft/Phi-4-mini-instruct",),
    "Qwen2ForCausalLM": (
        "Qwen/QwQ-32B",
        "Qwen/Qwen1.5-7B-Chat",
        "Qwen/Qwen2.5-Coder-7B-Instruct",
        "Qwen/Qwen2.5-Math-7B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "moonshotai/Kimi-Dev-72B",
        "AIDC-AI/Marco-o1",
    ),
    "Qwen2VLForConditionalGeneration": ("Qwen/QVQ-72B-Preview", "bytedance-research/UI-TARS-7B-DPO", "allenai/olmOCR-7B-0225-preview"),
    "Qwen2_5_VLForConditionalGeneration": ("XiaomiMiMo/MiMo-VL-7B-RL",),
    "Qwen3ForCausalLM": ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "Qwen/Qwen3Guard-Gen-4B"),
    "Qwen3MoeForCausalLM": (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "Alibaba-NLP/Tongyi-DeepResearch-30B-A3B",
        "AIDC-AI/Marco-Mini-Instruct",
    ),
    "Qwen3NextForCausalLM": ("Qwen/Qwen3-Coder-Next",),
    "Qwen3_5ForConditionalGeneration": ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.8-2.4T-A95B"),
}
