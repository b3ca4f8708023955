//! Options of the data: which datasets, how their rows are read, how they are batched.

use std::collections::BTreeMap;

use options::{ByteSize, Setting, choices, options};

options! {
    /// The training and validation data.
    pub struct Data: "Data" {
        /// Training datasets. A single dataset of type `auto` can also be written `dataset: PATH`.
        datasets: Option<Vec<Dataset>> = null;
        /// Validation datasets. Null holds out a part of the training rows.
        validation_datasets: Option<Vec<Dataset>> = null;
        /// Fraction of the training rows held out for validation if there are no `validation_datasets`.
        validation_split_ratio: f64 = 0.1, min = 0, below = 1;
        /// Mix the training datasets by probability: the share of each in the documents of an epoch, one number for each of
        /// `datasets`, 1 in all. Null takes every document as often as `repeats` says.
        interleave_probs: Option<Vec<f64>> = null;
        /// End of an epoch of `interleave_probs`.
        interleave_stopping: Stopping = "first_exhausted";
        /// Seed of shuffling, dropout and weight initialization in training.
        train_seed: u64 = 1234;
        /// Seed of the order in evaluation, which decides which documents share a row. The loss covers all rows, so
        /// only its rounding depends on it.
        eval_seed: u64 = 1234;
        /// Threads that prepare batches. 0 prepares them in the training loop; `auto` depends on the number of cores.
        dataloader_num_workers: Setting<u32> = auto, resumable;
        /// Folder for the cache of encoded rows, or `off`. `auto` is the variable SUROGATE_DATA_CACHE, else
        /// `surogate/rows` in the user's cache folder.
        data_cache: Setting<String> = auto, path, resumable;
        /// Pack several documents into a row. They do not attend to each other.
        sample_packing: bool = true;
        /// Boundary between the prompt of a preference and its answers.
        preference_split: PreferenceSplit = "spans";
        /// Shuffle the rows in every epoch. `false` keeps the order of the files.
        shuffle: bool = true;
        /// Read, encode and pack the training datasets while training, for data that do not fit the disk: files of datasets on
        /// the Hub and in buckets are fetched one after another and removed, and encoded rows are not kept. Needs `max_steps`.
        streaming: bool = false;
        /// Rows of a stream that are shuffled and packed together.
        shuffle_buffer_size: u64 = 8192, min = 1, max = 16_777_216;
        /// Most bytes that fetched files of a stream take on the disk at once.
        streaming_disk_limit: ByteSize = "16GiB", resumable;
    }
}

options! {
    /// One dataset.
    pub struct Dataset: "Dataset" {
        /// A file, a folder, a pattern of files (each also as `s3://…` or `gs://…`), or a dataset on the Hub as
        /// `owner/name` or `owner/name@revision`.
        path: String = required, path;
        /// The type of the rows.
        r#type: DatasetType = required;
        /// Part of a folder or Hub dataset that has several: a configuration name from its README, or a subfolder.
        subset: Option<String> = null;
        /// Split of a folder or Hub dataset, by its README or its file names.
        split: String = "train";
        /// Maximum number of rows. Null takes all.
        samples: Option<u64> = null, min = 1;
        /// Repetitions of each document in an epoch, for training sets: 2 takes every document twice, 0.5 takes half of
        /// them, 1.5 takes half of them twice. Documents that are held out are not repeated.
        repeats: f64 = 1.0, above = 0, max = 1000;
        /// Maximum uncompressed size of a row: a line, an element of a JSON list, a whole text file. Larger rows are
        /// dropped and counted, so that a small compressed file cannot exhaust the memory.
        max_row_size: ByteSize = "32MiB";
        /// The column with the text.
        text_field: String = "text", belongs_to = "text";
        /// The column with the task. Required there.
        instruction_field: Option<String> = null, belongs_to = "instruction";
        /// The column with the answer. Required there.
        output_field: Option<String> = null, belongs_to = "instruction";
        /// The column with additional input for the task.
        input_field: Option<String> = null, belongs_to = "instruction";
        /// Source of the system prompt.
        system_prompt_type: Option<SystemPromptType> = null, belongs_to = "instruction";
        /// The column with the system prompt, for `system_prompt_type: field`.
        system_prompt_field: Option<String> = null, belongs_to = "instruction";
        /// The system prompt, for `system_prompt_type: fixed`.
        system_prompt: Option<String> = null, belongs_to = "instruction";
        /// Format of a row, with the placeholders `{system}`, `{instruction}`, `{input}` and `{output}`.
        prompt_format: Option<String> = null, belongs_to = "instruction";
        /// The same for rows without an input.
        prompt_format_no_input: Option<String> = null, belongs_to = "instruction";
        /// The column with the messages.
        messages_field: String = "messages", belongs_to = "conversation";
        /// The column with the system prompt.
        system_field: Option<String> = null, belongs_to = "conversation or preference or unpaired";
        /// The column with the tools.
        tools_field: Option<String> = null, belongs_to = "conversation or preference or unpaired";
        /// Names of message properties in the data, as `role: from`. The usual pairs, `role`/`content` and
        /// `from`/`value`, are recognized without it.
        message_property_mappings: Option<BTreeMap<String, String>> = null,
            belongs_to = "conversation or preference or unpaired";
        /// The column with the prompt, a text or messages. Null finds it by its name; there may be none where both answers
        /// are whole conversations or texts that begin with it.
        prompt_field: Option<String> = null, belongs_to = "preference or unpaired";
        /// The column with the better answer, a text or messages. Null finds it by its name.
        chosen_field: Option<String> = null, belongs_to = "preference";
        /// The column with the worse answer. Null finds it by its name.
        rejected_field: Option<String> = null, belongs_to = "preference";
        /// The column with a number that says by how much the better answer is better. Null takes `margin` where it is
        /// there.
        margin_field: Option<String> = null, belongs_to = "preference";
        /// The column with the answer, a text or messages. Null finds it by its name, else the last message is the answer.
        completion_field: Option<String> = null, belongs_to = "unpaired";
        /// The column that says whether the answer is good: true or false, 1 or 0, `desirable` or `undesirable`. Null finds
        /// it by its name.
        label_field: Option<String> = null, belongs_to = "unpaired";
    }
}

choices! {
    /// End of an epoch of a mixture.
    pub enum Stopping {
        /// Before the first document would come twice: of all other datasets some are left out.
        FirstExhausted = "first_exhausted",
        /// After every document has come: of all other datasets some come several times.
        AllExhausted = "all_exhausted",
    }
}

choices! {
    /// Boundary between a prompt and its answer.
    pub enum PreferenceSplit {
        /// At the borders of messages and texts; of conversations the assistant's text and the token that ends it is
        /// trained.
        Spans = "spans",
        /// After the tokens that the prompt alone has in common with both answers, as TRL does it; all that follows is
        /// trained, the template's own text too.
        Trl = "trl",
    }
}

choices! {
    /// The type of a dataset's rows.
    pub enum DatasetType {
        /// Plain text; all tokens are trained.
        Text = "text",
        /// A task and its answer; the answer is trained.
        Instruction = "instruction",
        /// Chat messages; the assistant's are trained.
        Conversation = "conversation",
        /// A prompt with a better and a worse answer.
        Preference = "preference",
        /// A prompt with an answer and whether it is good.
        Unpaired = "unpaired",
        /// Token ids, optionally with labels, positions and weights.
        Tokens = "tokens",
        /// Detected from the columns.
        Auto = "auto",
    }
}

choices! {
    /// Source of the system prompt of an instruction.
    pub enum SystemPromptType {
        /// A column.
        Field = "field",
        /// The configuration.
        Fixed = "fixed",
    }
}
