//! `state.json` of a checkpoint, sealed again after it was changed: what a file says whose digest is right.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use serde_json::json;
use train::{ModelSource, Trainer};

use super::model_files::{IR, cpu, options};
use super::{scratch, stories};

/// Stands for the digest of the file itself while that is taken.
const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

const STATE: &str = "state.json";

/// A real checkpoint, the text of its state, and what in that text differs from machine to machine, with the words
/// that stand for it in inputs.
struct Original {
    folder: PathBuf,
    state: String,
    places: Vec<(String, String)>,
}

fn trainer() -> Trainer {
    let source = ModelSource::open(&stories(), IR).expect("the example's model is whole");
    Trainer::new(options(&json!({})), Arc::new(source), cpu()).expect("these options are right")
}

static ORIGINAL: LazyLock<Original> = LazyLock::new(|| {
    let folder = scratch("checkpoints").join("checkpoint-1");
    let _ = fs::remove_dir_all(&folder);
    let mut trainer = trainer();
    let ids: Vec<i32> = (3..35).collect();
    let rows = data::Batch::from_labels(1, 32, ids.clone(), &ids, None, None).expect("a row is right");
    trainer.step(&[rows], Some(1e-3)).expect("a step is done");
    trainer.save(&folder).expect("a checkpoint is written");
    let state = fs::read_to_string(folder.join(STATE)).expect("a checkpoint has a state");
    let mut places = vec![("@MODEL@".to_owned(), stories().display().to_string())];
    for entry in fs::read_dir(&folder).expect("a checkpoint is a folder") {
        let path = entry.expect("a checkpoint is a folder").path();
        let name = path.file_name().expect("a file has a name").to_string_lossy().into_owned();
        if name != STATE {
            let digest = blake3::hash(&fs::read(&path).expect("a checkpoint's file can be read")).to_hex().to_string();
            places.push((format!("@{name}@"), digest));
        }
    }
    Original { folder, state, places }
});

thread_local! {
    static TRAINER: RefCell<Option<Trainer>> = const { RefCell::new(None) };
}

/// Resumes from the real checkpoint with this state.
pub fn resume(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let original = &*ORIGINAL;
    let placed = original.places.iter().fold(text.to_owned(), |text, (word, value)| text.replace(word, value));
    let sealed = placed.replacen(NO_DIGEST, blake3::hash(placed.as_bytes()).to_hex().as_str(), 1);
    fs::write(original.folder.join(STATE), sealed).expect("a file of our own can be written");
    TRAINER.with_borrow_mut(|kept| {
        let taken = kept.get_or_insert_with(trainer).resume(&original.folder).is_ok();
        // One that has gone on is no new one.
        if taken {
            *kept = None;
        }
        taken
    })
}

pub fn seeds() -> Vec<Vec<u8>> {
    let original = &*ORIGINAL;
    let digest = serde_json::from_str::<serde_json::Value>(&original.state).expect("a state is JSON")["digest"]
        .as_str()
        .expect("a state has a digest")
        .to_owned();
    let unsealed = original.state.replacen(&digest, NO_DIGEST, 1);
    let seed = original.places.iter().fold(unsealed, |text, (word, value)| text.replace(value, word));
    vec![seed.into_bytes()]
}
