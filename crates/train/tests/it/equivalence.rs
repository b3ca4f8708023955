//! Choices that must not change the result: the distribution of rows into micro-batches, that of documents into rows,
//! and the shapes that were compiled before.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::Batch;
use serde_json::json;
use train::config::{self, Config, Task};
use train::{Device, DeviceRequest, ModelSource, Trainer};

const ROWS: usize = 8;
const LENGTH: usize = 12;

fn trainer() -> Trainer {
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned();
    let model = root.join("examples/stories/model");
    let source = Arc::new(ModelSource::open(&model, include_str!("../ir/stories.json")).unwrap());
    let options = json!({"model": model, "lora": false, "optimizer": "adamw", "learning_rate": 1e-3});
    let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
    let device = options::Setting::Value(config::Device::Cpu);
    let device = Device::open(&DeviceRequest { device, ..DeviceRequest::default() }).unwrap();
    Trainer::new(Arc::new(config), source, Arc::new(device)).unwrap()
}

/// The same eight rows for a step, some labels untrained so that micro-batches weigh differently.
fn rows(step: usize) -> (Vec<i32>, Vec<i32>, Vec<f32>) {
    let number = |i: usize| (step * 7919 + i * 104_729) % 509;
    let ids: Vec<i32> = (0..ROWS * LENGTH).map(|i| 3 + number(i) as i32).collect();
    let label = |i: usize| if (i / LENGTH + i).is_multiple_of(3) && i / LENGTH > 2 { -100 } else { ids[i] };
    let labels = (0..ids.len()).map(label).collect();
    let weights = (0..ids.len()).map(|i| 0.5 + (i % 4) as f32 * 0.25).collect();
    (ids, labels, weights)
}

/// The rows as micro-batches of `batch` rows.
fn dealt(step: usize, batch: usize) -> Vec<Batch> {
    let (ids, labels, weights) = rows(step);
    let part = |index: usize| {
        let range = index * batch * LENGTH..(index + 1) * batch * LENGTH;
        let weights = Some(&weights[range.clone()]);
        Batch::from_labels(batch, LENGTH, ids[range.clone()].to_vec(), &labels[range], None, weights).unwrap()
    };
    (0..ROWS / batch).map(part).collect()
}

/// The rows as documents of `rows` longer rows.
fn packed(step: usize, rows_wanted: usize) -> Vec<Batch> {
    let (ids, labels, weights) = rows(step);
    let positions = (0..ids.len()).map(|i| (i % LENGTH) as i32).collect();
    let length = ids.len() / rows_wanted;
    vec![Batch::from_labels(rows_wanted, length, ids, &labels, Some(positions), Some(&weights)).unwrap()]
}

fn curve(steps: usize, deal: impl Fn(usize) -> Vec<Batch>) -> Vec<(f64, f64)> {
    let mut trainer = trainer();
    let step = |s: usize| {
        let metrics = trainer.step(&deal(s), Some(1e-3)).unwrap();
        (metrics.loss, metrics.grad_norm)
    };
    (0..steps).map(step).collect()
}

fn assert_same(found: &[(f64, f64)], expected: &[(f64, f64)], what: &str) {
    for (step, (f, e)) in found.iter().zip(expected).enumerate() {
        let far = (f.0 / e.0 - 1.0).abs().max((f.1 / e.1 - 1.0).abs() / 10.0);
        assert!(far < 1e-5, "{what}, step {step}: {f:?} instead of {e:?}");
    }
}

#[test]
fn one_times_eight_is_two_times_four_is_eight_times_one() {
    let whole = curve(20, |step| dealt(step, 8));
    assert!(whole[19].0 < whole[0].0, "{whole:?}");
    assert_same(&curve(20, |step| dealt(step, 4)), &whole, "2 × 4");
    assert_same(&curve(20, |step| dealt(step, 1)), &whole, "8 × 1");
}

#[test]
fn packed_rows_are_rows_of_their_own() {
    let apart = curve(5, |step| dealt(step, 8));
    assert_same(&curve(5, |step| packed(step, 2)), &apart, "four documents a row");
    // The shape changes within the run: entries are added, optimizer states stay where they are.
    let changing = |step: usize| match step % 3 {
        0 => dealt(step, 4),
        1 => packed(step, 1),
        _ => packed(step, 4),
    };
    assert_same(&curve(5, changing), &apart, "changing shapes");
}

/// The rows, each with `more` tokens after it that no one trains on.
fn lengthened(step: usize, more: usize) -> Vec<Batch> {
    let (ids, labels, weights) = rows(step);
    let row = |values: &[f32], fill: f32| [values, &vec![fill; more]].concat();
    let ints = |values: &[i32], fill: i32| -> Vec<i32> {
        values.chunks(LENGTH).flat_map(|row| [row, &vec![fill; more]].concat()).collect()
    };
    let weights: Vec<f32> = weights.chunks(LENGTH).flat_map(|values| row(values, 1.0)).collect();
    let (ids, labels) = (ints(&ids, 3), ints(&labels, -100));
    vec![Batch::from_labels(ROWS, LENGTH + more, ids, &labels, None, Some(&weights)).unwrap()]
}

#[test]
fn more_shapes_in_turn_than_are_kept_change_nothing() {
    let steps = 14;
    let apart = curve(steps, |step| dealt(step, 8));
    // Ten lengths, and then the first four again, which have been given up for later ones by then.
    assert_same(&curve(steps, |step| lengthened(step, 1 + step % 10)), &apart, "ten alternating lengths");
}

#[test]
fn a_step_without_a_trained_token_is_refused() {
    let batch = Batch::from_labels(1, 4, vec![1; 4], &[5, -100, -100, -100], None, None).unwrap();
    let error = trainer().step(&[batch], Some(1e-3)).unwrap_err();
    assert!(error.to_string().contains("no token of the step is trained"), "{error}");
}

#[test]
fn ids_outside_of_the_vocabulary_are_refused() {
    let batch = Batch::from_labels(1, 4, vec![1, 2, 512, 3], &[1; 4], None, None).unwrap();
    let error = trainer().step(&[batch], Some(1e-3)).unwrap_err();
    assert!(error.to_string().contains("512"), "{error}");
}

#[test]
fn without_a_length_the_schedule_asks_for_one() {
    let error = trainer().step(&dealt(0, 8), None).unwrap_err();
    assert!(error.to_string().contains("max_steps"), "{error}");
}
