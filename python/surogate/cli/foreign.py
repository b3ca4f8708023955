"""`surogate init --from FILE`: the run.yaml that a configuration of Axolotl, LLaMA-Factory or TRL comes to.

Knows the names, values and defaults of those tools. Which names are only called differently here, what helps where one has no
counterpart, and whether a value is right, the engine says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _native
from ..errors import ConfigError
from .foreign_preferences import OF_LLAMA_FACTORY, of_axolotl, of_llama_factory, of_trl

Fields = dict[str, Any]

#: Values of options that these tools take where nothing is written, as far as they are not those of this engine.
OF_TRANSFORMERS: Fields = {
    "learning_rate": 5e-5,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": "adamw",
    "weight_decay": 0.0,
    "sample_packing": False,
    "truncation_strategy": "right",
    "validation_split_ratio": 0.0,
}
DEFAULTS: dict[str, Fields] = {
    "LLaMA-Factory": {**OF_TRANSFORMERS, "sequence_len": 2048},
    "TRL": {**OF_TRANSFORMERS, "learning_rate": 2e-5, "sequence_len": 1024},
    "Axolotl": {
        **OF_TRANSFORMERS,
        "per_device_train_batch_size": 1,
        "num_epochs": 1,
        "lr_scheduler_type": "cosine",
        "sequence_len": 512,
        "truncation_strategy": "delete",
    },
}
OF_ADAPTERS: dict[str, Fields] = {
    "LLaMA-Factory": {"lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0},
    "TRL": {"lora_rank": 16, "lora_alpha": 32},
    "Axolotl": {"lora_dropout": 0.0},
}

#: Learning-rate schedules by their other names.
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}

#: Numbers of transformers' schedules, and the options that they are here.
OF_SCHEDULES = {
    "min_lr_rate": "final_lr_fraction",
    "min_lr_ratio": "final_lr_fraction",
    "num_decay_steps": "cooldown_steps",
}

#: Beginnings of names of templates, and the name here.
TEMPLATES = [
    ("chatml", "chatml"), ("qwen", "qwen"), ("llama3", "llama3"), ("llama2", "llama2"), ("mistral", "mistral"),
    ("gemma", "gemma"), ("phi4", "phi4"), ("phi_4", "phi4"), ("phi", "phi3"), ("deepseek", "deepseek"),
    ("alpaca", "alpaca"), ("vicuna", "vicuna"), ("zephyr", "zephyr"), ("smollm3", "smollm3"), ("gpt", "gpt-oss"),
]  # fmt: skip


@dataclass
class Draft:
    """The run that a configuration comes to."""

    tool: str
    task: str = "sft"
    options: Fields = field(default_factory=dict)
    #: Names without a counterpart, and what is to be said of each.
    left_out: dict[str, str] = field(default_factory=dict)


class Source:
    """The entries of a configuration, each taken once."""

    def __init__(self, fields: Fields, draft: Draft) -> None:
        self._left = dict(fields)
        self._draft = draft

    def take(self, *names: str) -> Any:
        """The value of the first of these names that is there, without which the entries go on."""
        found = [self._left.pop(name) for name in names if name in self._left]
        return next((value for value in found if value is not None), None)

    def is_on(self, *names: str) -> bool:
        """Says whether a switch is there and on."""
        return _is_on(self.take(*names))

    def put(self, option: str, *names: str, by: Callable[[Any], Any] = lambda value: value) -> None:
        """Takes an option from other names. A value for which there is none is left out."""
        for name in names:
            value = self.take(name)
            if value is None:
                continue
            converted = by(value)
            if converted is None:
                self.leave(name, f"`{option}` has no such value as {json.dumps(value)}")
            else:
                self._draft.options[option] = converted

    def leave(self, name: str, why: str) -> None:
        """Names what has no counterpart."""
        self._draft.left_out[name] = why

    def rest(self) -> Fields:
        """The entries that were not converted."""
        return self._left


def _number(value: Any) -> Any:
    """A number as YAML 1.1 writes some: `1.e-4`."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+\.?\d*[eE][+-]?\d+", value) else value


def _is_on(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "yes", "on", "auto", "full", "1")


def _is_off(value: Any) -> bool:
    return value in (None, False, 0, "", [], {}) or str(value).lower() in ("false", "no", "off", "none")


def convert(text: str, name: str) -> Draft:
    """The run that a YAML text describes. Raises ConfigError where it is none of a known tool."""
    fields = json.loads(_native.read_yaml(text, name))
    if not isinstance(fields, dict):
        raise ConfigError(f"{name}: expected a list of `name: value` lines")
    draft = Draft(_tool(fields, name))
    source = Source({key: _number(value) for key, value in fields.items() if value is not None}, draft)
    {"Axolotl": _axolotl, "LLaMA-Factory": _llama_factory, "TRL": _trl}[draft.tool](source, draft, Path(name).parent)
    _common(source, draft)
    for key, value in source.rest().items():
        _remaining(key, value, draft)
    defaults = DEFAULTS[draft.tool] | (OF_ADAPTERS[draft.tool] if draft.options["lora"] else {})
    # TRL's way to say that nothing is cut.
    if draft.tool == "TRL" and fields.get("max_length", 0) is None:
        defaults.pop("sequence_len")
    # The defaults of TRL's other trainers are those of the tasks here.
    if draft.tool == "TRL" and draft.task not in ("sft", "pt"):
        defaults.pop("learning_rate")
    given = set(draft.options)
    draft.options = defaults | draft.options
    if not draft.options["lora"]:
        for option in [option for option in draft.options if option.startswith(("lora_", "qlora_", "modules_to"))]:
            source.leave(option, f"`{option}: {draft.options.pop(option)}` is of adapters, and all weights are trained")
    _check(draft, given)
    return draft


def _tool(fields: Fields, name: str) -> str:
    if "base_model" in fields:
        return "Axolotl"
    if "model_name_or_path" not in fields:
        known = "`base_model` of Axolotl, `model_name_or_path` of LLaMA-Factory and TRL"
        raise ConfigError(f"{name}: not the configuration of a tool that is known here: it has none of {known}")
    own = {"stage", "finetuning_type", "cutoff_len", "dataset", "dataset_dir", "template", "lora_target", "do_train"}
    return "LLaMA-Factory" if own & set(fields) else "TRL"


def _remaining(key: str, value: Any, draft: Draft) -> None:
    """An entry that no rule has: an option of the same name, one that is called differently, or none."""
    word = str(value).lower() if isinstance(value, bool) else str(value)
    option, hint = _native.foreign_option(key, None if isinstance(value, (list, dict)) else word)
    own = {row["name"] for row in json.loads(_native.config_help())}
    if option is None and key in own:
        option = key
    if option is not None:
        draft.options[option] = value
    elif not (hint or "").startswith("remove it") and not _is_off(value):
        draft.left_out[key] = hint or "there is no such option"
    elif hint is None and not _is_off(value):
        draft.left_out[key] = "there is no such option"


def _check(draft: Draft, given: set[str]) -> None:
    """Leaves out what the engine refuses, with its words where the file gives it. Raises what is wrong with model and data."""
    while True:
        try:
            _native.Config.from_json(json.dumps(draft.options), draft.task, [], None)
            return
        except ConfigError as error:
            problems = json.loads(getattr(error, "problems", "[]"))
            wrong = {problem["path"].split("[")[0].split(".")[0]: problem["message"] for problem in problems}
            wrong = {option: why for option, why in wrong.items() if option in draft.options}
            if not wrong or wrong.keys() & {"model", "datasets", "validation_datasets"}:
                raise
            for option, why in wrong.items():
                if option in given:
                    draft.left_out[option] = why
                del draft.options[option]


def _common(source: Source, draft: Draft) -> None:
    """The entries that all three write alike, or transformers' arguments."""
    source.put("model", "model_name_or_path", "base_model")
    source.put("optimizer", "optim", "optimizer", by=_optimizer)
    source.put("lr_scheduler_type", "lr_scheduler", "lr_scheduler_type", by=lambda of: SCHEDULES.get(str(of)))
    _schedule(source, draft)
    source.put("train_seed", "seed")
    source.put("per_device_train_batch_size", "micro_batch_size", "batch_size")
    source.put("new_tokens", "tokens", "add_tokens", "new_special_tokens", by=_names)
    source.put("modules_to_save", "lora_modules_to_save", "additional_target", by=_names)
    if source.is_on("use_rslora", "peft_use_rslora"):
        draft.options["lora_rslora"] = True
    source.put("max_steps", "max_steps", by=lambda of: of if of else -1)
    if source.is_on("bf16", "pure_bf16"):
        draft.options["torch_dtype"] = "bfloat16"
    elif source.is_on("fp16"):
        draft.options["torch_dtype"] = "float16"
    source.take("bf16", "fp16", "pure_bf16")
    dtype = source.take("torch_dtype", "dtype", "infer_dtype")
    if dtype not in (None, "auto"):
        draft.options["torch_dtype"] = str(dtype)
    if source.is_on("load_in_4bit"):
        draft.options["qlora_bnb"] = True
    if source.is_on("load_in_8bit"):
        draft.options["qlora_fp8"] = True
        source.leave("load_in_8bit", "8 bits are `qlora_fp8: true` here: another format than bitsandbytes'")
    source.put("resume_from_checkpoint", "resume_from_checkpoint", "auto_resume_from_checkpoints")
    _reports(source, draft)
    if source.is_on("train_on_inputs", "train_on_prompt"):
        draft.options["loss_scale"] = "all"
    if source.is_on("mask_history"):
        draft.options["loss_scale"] = "last_round"
    strategies = [("eval_strategy", "evals_per_epoch", "evaluation_strategy"), ("save_strategy", "saves_per_epoch", "")]
    for option, per_epoch, other in strategies:
        source.put(option, option, *([other] if other else []))
        count = source.take(per_epoch)
        if count == 1:
            draft.options[option] = "epoch"
        elif count:
            source.leave(per_epoch, f"`{option}: epoch` is once in an epoch; more often is `{option[:4]}_steps`")
    for steps, strategy in (("eval_steps", "eval_strategy"), ("save_steps", "save_strategy")):
        if draft.options.get(strategy, "steps") != "steps":
            source.take(steps)


def _schedule(source: Source, draft: Draft) -> None:
    """The numbers of a schedule: those of transformers' `lr_scheduler_kwargs`, and of Axolotl's own entry."""
    given = source.take("lr_scheduler_kwargs")
    numbers = dict(given) if isinstance(given, dict) else {}
    if draft.options.get("lr_scheduler_type") == "cosine_with_restarts":
        draft.options["lr_cycles"] = numbers.pop("num_cycles", 1)
    least, peak = numbers.get("min_lr"), source.rest().get("learning_rate")
    if isinstance(least, (int, float)) and isinstance(peak, (int, float)) and peak > 0:
        draft.options["final_lr_fraction"] = numbers.pop("min_lr") / peak
    for name, option in OF_SCHEDULES.items():
        if name in numbers:
            draft.options[option] = numbers.pop(name)
    source.put("final_lr_fraction", "cosine_min_lr_ratio")
    if numbers or not (given is None or isinstance(given, dict)):
        source.leave("lr_scheduler_kwargs", f"of {json.dumps(numbers or given)} nothing is known here")


def _reports(source: Source, draft: Draft) -> None:
    wanted = source.take("report_to")
    names = [str(name) for name in (wanted if isinstance(wanted, list) else [wanted]) if not _is_off(name)]
    if source.is_on("use_wandb"):
        names.append("wandb")
    known = [name for name in ("wandb", "tensorboard", "aim") if name in names]
    unknown = [name for name in names if name not in known]
    if unknown:
        source.leave("report_to", f"there is no tracker {', '.join(unknown)}; there are wandb, tensorboard and aim")
    if known:
        draft.options["report_to"] = known


def _optimizer(name: Any) -> str | None:
    plain = str(name).lower()
    if "adamw" in plain or plain == "adam":
        return "adamw_8bit" if "8bit" in plain else "adamw"
    return None


def _names(of: Any) -> list[str]:
    """A list, or one text with commas."""
    parts = of if isinstance(of, list) else str(of).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _number_of(word: str) -> Any:
    try:
        return float(word)
    except ValueError:
        return word


def _targets(of: Any) -> list[str]:
    return ["all-linear" if name in ("all", "all-linear") else name for name in _names(of)]


def _template(of: Any) -> str | None:
    plain = str(of).lower().replace("-", "_")
    return next((name for begin, name in TEMPLATES if plain.startswith(begin)), None)


def _axolotl(source: Source, draft: Draft, _: Path) -> None:
    of_axolotl(source, draft)
    # The class that transformers loads: the model's configuration says it.
    source.take("model_type")
    adapter = source.take("adapter")
    draft.options["lora"] = adapter is not None
    if adapter not in (None, "lora", "qlora"):
        source.leave("adapter", f"there is no adapter {adapter}: LoRA is trained")
    if adapter == "qlora":
        draft.options["qlora_bnb"] = True
    if source.is_on("lora_target_linear"):
        draft.options["lora_target_modules"] = ["all-linear"]
    source.put("lora_target_modules", "lora_target_modules", by=_targets)
    template = source.take("chat_template")
    if template is not None and not str(template).startswith("tokenizer_default"):
        source.put("template", "chat_template_jinja")
        if (name := _template(template)) is not None:
            draft.options.setdefault("template", name)
        elif template != "jinja":
            source.leave("chat_template", f"there is no template {template}: the model's own is used")
    if (project := source.take("wandb_project")) is not None:
        draft.options |= {"wandb_project": project, "report_to": ["wandb"]}
    size = source.take("val_set_size")
    if isinstance(size, (int, float)) and 0 < size < 1:
        draft.options["validation_split_ratio"] = size
    elif size:
        source.leave("val_set_size", "`validation_split_ratio` is a fraction of the rows")
    source.put("data_cache", "dataset_prepared_path")
    before = source.take("pretraining_dataset")
    if before is not None:
        draft.task = "pt"
        sets = before if isinstance(before, list) else [before]
        items = [of if isinstance(of, dict) else {"path": of} for of in sets]
        draft.options["datasets"] = [_axolotl_set({**of, "type": "completion"}, source) for of in items]
    for option, name in (("datasets", "datasets"), ("validation_datasets", "test_datasets")):
        if (sets := source.take(name)) is not None:
            draft.options[option] = [_axolotl_set(of if isinstance(of, dict) else {"path": of}, source) for of in sets]


#: Entries of Axolotl's data sets, and what they are here.
OF_SETS = {
    "name": "subset",
    "split": "split",
    "field_messages": "messages_field",
    "field_system": "system_field",
    "field_tools": "tools_field",
    "field_instruction": "instruction_field",
    "field_output": "output_field",
    "field_input": "input_field",
    "format": "prompt_format",
    "no_input_format": "prompt_format_no_input",
    "message_property_mappings": "message_property_mappings",
    "system_prompt": "system_prompt",
}


def _axolotl_set(of: Fields, source: Source) -> Fields:
    given = {key: value for key, value in of.items() if value is not None}
    kind = given.pop("type", None)
    files = given.pop("data_files", None)
    path = given.pop("path", "")
    if files is not None and path in ("json", "csv", "parquet", "text", "arrow"):
        path = files[0] if isinstance(files, list) else files
        if isinstance(files, list) and len(files) > 1:
            source.leave("datasets.data_files", f"{len(files)} files of a set: only {path} was taken, add the others as sets")
    elif files is not None:
        source.leave("datasets.data_files", f"give {path} a pattern of these files: {json.dumps(files)}")
    found: Fields = {"path": str(path), "type": "auto"}
    if isinstance(kind, dict):
        given = {**kind, **given}
        found["type"] = "instruction"
    elif kind is not None:
        word = str(kind).split(".")[0]
        found["type"] = {
            "completion": "text",
            "chat_template": "conversation",
            "sharegpt": "conversation",
        }.get(word, "auto")
    if found["type"] == "text" and (column := given.pop("field", None)) is not None:
        found["text_field"] = column
    role, content = given.pop("message_field_role", None), given.pop("message_field_content", None)
    if role or content:
        found["message_property_mappings"] = {"role": role or "role", "content": content or "content"}
    given.pop("ds_type", None)
    for key, value in given.items():
        if key in OF_SETS:
            found[OF_SETS[key]] = value
        elif not _is_off(value):
            source.leave(f"datasets.{key}", "there is no such entry of a set")
    return found


def _llama_factory(source: Source, draft: Draft, folder: Path) -> None:
    stage = source.take("stage") or "sft"
    if stage not in OF_LLAMA_FACTORY:
        raise ConfigError(f"stage: {stage}: there is no such task; there are {', '.join(OF_LLAMA_FACTORY)}")
    of_llama_factory(source, draft, stage)
    kind = source.take("finetuning_type") or "lora"
    draft.options["lora"] = kind != "full"
    if kind not in ("full", "lora"):
        source.leave("finetuning_type", f"{kind} is not available: LoRA is trained")
    bits = source.take("quantization_bit")
    if bits is not None:
        draft.options["qlora_bnb" if int(bits) == 4 else "qlora_fp8"] = True
    source.put("lora_target_modules", "lora_target", by=_targets)
    rank = source.take("lora_rank")
    if rank is not None:
        draft.options |= {"lora_rank": rank, "lora_alpha": 2 * int(rank)}
    template = source.take("template")
    if template not in (None, "default", "empty"):
        if (name := _template(template)) is not None:
            draft.options["template"] = name
        else:
            source.leave("template", f"there is no template {template}: the model's own is used")
    packings = [source.take(name) for name in ("packing", "neat_packing")]
    draft.options["sample_packing"] = any(map(_is_on, packings)) or (packings[0] is None and stage == "pt")
    strategy, shares = str(source.take("mix_strategy") or "concat"), source.take("interleave_probs")
    if strategy != "concat" and shares is not None:
        draft.options["interleave_probs"] = [_number_of(share) for share in _names(shares)]
    elif strategy != "concat":
        source.leave("mix_strategy", "`interleave_probs` mixes the sets by a probability of each")
    place, samples = source.take("dataset_dir"), source.take("max_samples")
    for option, name in (("datasets", "dataset"), ("validation_datasets", "eval_dataset")):
        if (names := source.take(name)) is not None:
            sets = [_listed_set(of, Path(place or "data"), folder, draft.task, source) for of in _names(names)]
            draft.options[option] = [{**of, "samples": samples} if samples else of for of in sets]
    size = source.take("val_size")
    if isinstance(size, (int, float)) and 0 < size < 1:
        draft.options["validation_split_ratio"] = size
    elif size:
        source.leave("val_size", "`validation_split_ratio` is a fraction of the rows")
    source.take("do_train", "overwrite_output_dir")


def _listed_set(name: str, place: Path, folder: Path, task: str, source: Source) -> Fields:
    """A set of LLaMA-Factory, by its entry of dataset_info.json where that is there."""
    kind = "text" if task == "pt" else "auto"
    lists = [base / place / "dataset_info.json" for base in (Path(), folder)]
    listed = next((json.loads(path.read_text(encoding="utf-8")) for path in lists if path.is_file()), None)
    entry = (listed or {}).get(name)
    if entry is None:
        why = f"it is in no {lists[0]} here: put its file, or its name on the Hub, in `datasets`"
        source.leave(f"dataset {name}", why)
        return {"path": name, "type": kind}
    if entry.get("ranking") and task in ("sft", "pt"):
        raise ConfigError(f"dataset: {name}: it holds preferences: set `stage: dpo`")
    path = str(place / entry["file_name"]) if "file_name" in entry else entry.get("hf_hub_url", name)
    found: Fields = {"path": path, "type": kind}
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if entry.get("ranking"):
        found["type"] = "preference"
        of = {"prompt_field": "prompt" if "prompt" in columns else "messages", "chosen_field": "chosen", "rejected_field": "rejected"}
        found |= {option: columns[column] for option, column in of.items() if column in columns}
    elif "kto_tag" in columns:
        found |= {"type": "unpaired", "label_field": columns["kto_tag"]}
    elif kind == "text":
        found |= {"text_field": columns["prompt"]} if "prompt" in columns else {}
    elif entry.get("formatting") == "sharegpt":
        found |= {"type": "conversation", "messages_field": columns.get("messages", "conversations")}
        found |= {of: columns[column] for of, column in (("system_field", "system"), ("tools_field", "tools")) if column in columns}
        if "role_tag" in tags or "content_tag" in tags:
            role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
            found["message_property_mappings"] = {"role": role, "content": content}
    elif columns:
        found |= {"type": "instruction", "instruction_field": columns.get("prompt", "instruction")}
        found |= {"output_field": columns.get("response", "output")}
        found |= {"input_field": columns["query"]} if "query" in columns else {}
        if "system" in columns:
            found |= {"system_prompt_type": "field", "system_prompt_field": columns["system"]}
        if "history" in columns:
            source.leave(f"dataset {name}", f"earlier turns in the column {columns['history']}")
    found |= {option: entry[name] for option, name in (("subset", "subset"), ("split", "split")) if name in entry}
    return found | ({"samples": entry["num_samples"]} if "num_samples" in entry else {})


def _trl(source: Source, draft: Draft, _: Path) -> None:
    of_trl(source, draft)
    draft.options["lora"] = source.is_on("use_peft")
    source.put("lora_target_modules", "lora_target_modules", by=_targets)
    source.put("sequence_len", "max_length", "max_seq_length")
    source.put("sample_packing", "packing", by=_is_on)
    column = source.take("dataset_text_field")
    mixture = source.take("datasets") or []
    name, subset = source.take("dataset_name"), source.take("dataset_config")
    split = source.take("dataset_train_split")
    sets = [{"path": of["path"], "subset": of.get("name"), "split": of.get("split")} for of in mixture]
    if name is not None:
        sets.append({"path": name, "subset": subset, "split": split})
    of_text = {"type": "text", "text_field": column} if column not in (None, "text") else {"type": "auto"}
    found = [{key: value for key, value in of.items() if value is not None} | of_text for of in sets]
    if found:
        draft.options["datasets"] = found
    held_out = source.take("dataset_test_split")
    if held_out and name is not None and source.rest().get("eval_strategy") not in (None, "no"):
        draft.options["validation_datasets"] = [{**found[-1], "split": held_out}]
    if not source.is_on("assistant_only_loss") and draft.task == "sft":
        why = "without it TRL trains every token of a conversation; here answers alone, unless `loss_scale: all` is set"
        source.leave("assistant_only_loss", why)
    source.take("completion_only_loss")


def text(draft: Draft, name: str) -> str:
    """The file, with what was left out as remarks."""
    lines = [f"# From {name} ({draft.tool}). Values of its defaults are written out where they differ.", ""]
    order = ["model", "datasets", "validation_datasets", "output_dir"]
    options = {key: draft.options[key] for key in [*order, *draft.options] if key in draft.options}
    for key, value in options.items():
        if key.endswith("datasets"):
            lines += [f"{key}:", *[f"  - {json.dumps(of, ensure_ascii=False)}" for of in value]]
        else:
            lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    if draft.left_out:
        lines += ["", "# Without a counterpart:", *[f"#   {line}" for line in remarks(draft)]]
    return "\n".join(lines) + "\n"


def remarks(draft: Draft) -> list[str]:
    """A line for each name that was left out."""
    return [f"{key}: {why}" for key, why in draft.left_out.items()]
