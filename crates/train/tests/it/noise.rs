//! NEFTune: noise on the embeddings of training steps, and nowhere else.

use crate::stories::{config, device, source};
use data::Batch;
use serde_json::{Value, json};
use train::Trainer;

fn trainer(more: &Value) -> Trainer {
    let mut options = json!({"torch_dtype": "float32", "lora_dropout": 0.0, "train_seed": 3});
    for (name, value) in more.as_object().unwrap() {
        options[name] = value.clone();
    }
    Trainer::begin(config(&std::env::temp_dir(), &options), source(), device()).unwrap()
}

/// Two rows of two documents each.
fn rows() -> Vec<Batch> {
    let ids: Vec<i32> = (0..32).map(|i| (i * 37) % 400 + 3).collect();
    let positions = (0..32).map(|i| if i % 16 < 6 { i % 16 } else { i % 16 - 6 }).collect();
    vec![Batch::from_labels(2, 16, ids.clone(), &ids, Some(positions), None).unwrap()]
}

/// Loss and norm of the first step, and the loss of what is held out before it.
fn first(more: &Value) -> (f64, f64, f64) {
    let mut trainer = trainer(more);
    let evaluated = trainer.evaluate().unwrap().expect("a part is held out").loss.expect("it is a mean over tokens");
    let metrics = trainer.step(&rows(), Some(1e-3)).unwrap();
    (metrics.loss, metrics.grad_norm, evaluated)
}

#[test]
fn training_steps_see_noise_and_evaluations_none() {
    for lora in [true, false] {
        let (loss, norm, evaluated) = first(&json!({"lora": lora}));
        let noisy = json!({"lora": lora, "neftune_noise_alpha": 5.0});
        let of_noisy = first(&noisy);
        assert_eq!(of_noisy.2, evaluated, "an evaluation sees none");
        assert!((of_noisy.0 / loss - 1.0).abs() > 1e-5 && of_noisy.1 != norm, "{of_noisy:?} {loss} {norm}");
        assert_eq!(first(&noisy), of_noisy, "run again");
        let again = json!({"lora": lora, "neftune_noise_alpha": 5.0, "recompute_block": true});
        assert_eq!(first(&again), of_noisy, "recomputed");
        let other = first(&json!({"lora": lora, "neftune_noise_alpha": 5.0, "train_seed": 4}));
        assert!(other.0 != of_noisy.0, "another seed, another noise");
        let louder = first(&json!({"lora": lora, "neftune_noise_alpha": 50.0}));
        assert!((louder.0 - loss).abs() > (of_noisy.0 - loss).abs(), "{louder:?} {of_noisy:?} {loss}");
    }
}
