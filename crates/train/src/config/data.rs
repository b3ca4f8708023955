//! Options of the data: which sets, how their rows are read, how they are dealt into batches.

use options::{ByteSize, Setting, choices, options};
use std::collections::BTreeMap;

options! {
    /// The rows to train on.
    pub struct Data: "Data" {
        /// The sets to train on. One set of type `auto` can also be written `dataset: PATH`.
        datasets: Option<Vec<Dataset>> = null;
        /// The sets to evaluate on. Null takes a part of the training rows.
        validation_datasets: Option<Vec<Dataset>> = null;
        /// Share of the training rows that is kept for evaluation if there are no `validation_datasets`.
        validation_split_ratio: f64 = 0.1, min = 0, below = 1;
        /// Seed of order, dropout and new weights in training.
        train_seed: u64 = 1234;
        /// Seed of the order in evaluation, which decides what shares a row. The loss is over all rows, so only its
        /// rounding depends on it.
        eval_seed: u64 = 1234;
        /// Threads that prepare batches. 0 prepares them inside the loop; `auto` follows the number of cores.
        dataloader_num_workers: Setting<u32> = auto, resumable;
        /// The folder in which encoded rows are kept for the next run, or `off`. `auto` is that of the variable
        /// SUROGATE_DATA_CACHE, else `surogate/rows` in the user's folder for such things.
        data_cache: Setting<String> = auto, resumable;
        /// Put several documents into a row. They do not see each other.
        sample_packing: bool = true;
        /// Deal the rows in a new order each epoch. `false` keeps the order of the files.
        shuffle: bool = true;
    }
}

options! {
    /// One set of rows.
    pub struct Dataset: "Data set" {
        /// A file, a folder, a pattern of files (each also as `s3://…` or `gs://…`), or a set on the hub as `owner/name` or
        /// `owner/name@revision`.
        path: String = required;
        /// What a row is.
        r#type: DatasetType = required;
        /// Part of a folder or of a set on the hub that holds several: a name of its README's list, or a folder in it.
        subset: Option<String> = null;
        /// Split of a folder or of a set on the hub, by its README's list or the names of its files.
        split: String = "train";
        /// Most rows to take. Null takes all.
        samples: Option<u64> = null, min = 1;
        /// Most that a row may take once it is unpacked: a line, an element of a JSON list, a whole text file. A larger row
        /// is left out and counted, so that a small file does not fill the memory.
        max_row_size: ByteSize = "32MiB";
        /// The column with the text.
        text_field: String = "text", belongs_to = "text";
        /// The column with the task. Required there.
        instruction_field: Option<String> = null, belongs_to = "instruction";
        /// The column with the answer. Required there.
        output_field: Option<String> = null, belongs_to = "instruction";
        /// The column with what the task is about.
        input_field: Option<String> = null, belongs_to = "instruction";
        /// Where the system prompt comes from.
        system_prompt_type: Option<SystemPromptType> = null, belongs_to = "instruction";
        /// The column with the system prompt, for `system_prompt_type: field`.
        system_prompt_field: Option<String> = null, belongs_to = "instruction";
        /// The system prompt, for `system_prompt_type: fixed`.
        system_prompt: Option<String> = null, belongs_to = "instruction";
        /// The text of a row, with `{system}`, `{instruction}`, `{input}` and `{output}` to be filled in.
        prompt_format: Option<String> = null, belongs_to = "instruction";
        /// The same for rows without an input.
        prompt_format_no_input: Option<String> = null, belongs_to = "instruction";
        /// The column with the messages.
        messages_field: String = "messages", belongs_to = "conversation";
        /// The column with the system prompt.
        system_field: Option<String> = null, belongs_to = "conversation";
        /// The column with the tools.
        tools_field: Option<String> = null, belongs_to = "conversation";
        /// What the properties of a message are called in the data, as `role: from`. Both the usual
        /// pairs, `role`/`content` and `from`/`value`, are known without it.
        message_property_mappings: Option<BTreeMap<String, String>> = null, belongs_to = "conversation";
    }
}

choices! {
    /// What a row of a data set is.
    pub enum DatasetType {
        /// A text; all of it is trained.
        Text = "text",
        /// A task and its answer; the answer is trained.
        Instruction = "instruction",
        /// Messages of a conversation; the assistant's are trained.
        Conversation = "conversation",
        /// Token ids, with labels, positions and weights if the columns are there.
        Tokens = "tokens",
        /// Recognised by the columns.
        Auto = "auto",
    }
}

choices! {
    /// Where the system prompt of an instruction comes from.
    pub enum SystemPromptType {
        /// A column.
        Field = "field",
        /// The configuration.
        Fixed = "fixed",
    }
}
