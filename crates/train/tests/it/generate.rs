//! Generation with a cache against the model run on whole rows: the likeliest tokens, batches, prompts in parts, pages.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::Batch;
use tensor::DType;
use train::{Device, DeviceRequest, Generation, GenerationOptions, Generator, Model, ModelSource, Prompt};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

fn source(name: &str) -> Arc<ModelSource> {
    let folder = root().join("tests/golden").join(name);
    let ir = std::fs::read_to_string(root().join(format!("crates/train/tests/ir/{name}.json"))).unwrap();
    Arc::new(ModelSource::open(&folder, &ir).unwrap())
}

fn device() -> Arc<Device> {
    let request = DeviceRequest {
        device: options::Setting::Value(train::config::Device::Cpu),
        threads: Some(2),
        ..DeviceRequest::default()
    };
    Arc::new(Device::open(&request).unwrap())
}

fn generator(name: &str) -> Generator {
    Generator::new(device(), source(name), None, DType::F32).unwrap()
}

fn options(given: &[(&str, &str)]) -> GenerationOptions {
    let given: Vec<_> = given.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    GenerationOptions::read(&given).unwrap()
}

fn answers(generator: &mut Generator, prompts: &[Vec<i32>], given: &[(&str, &str)]) -> Vec<Vec<i32>> {
    let prompts: Vec<Prompt> = prompts.iter().map(|ids| Prompt::Ids(ids.clone())).collect();
    let mut generation = Generation::start(generator, &prompts, &options(given)).unwrap();
    while !generation.is_done() {
        generation.step(generator).unwrap();
    }
    (0..prompts.len()).map(|prompt| generation.answer(prompt).to_vec()).collect()
}

/// The likeliest tokens by running all of the row for each.
fn by_whole_rows(model: &mut Model, prompt: &[i32], tokens: usize) -> Vec<i32> {
    let mut ids = prompt.to_vec();
    // One shape for all: what is after the row's end is not seen.
    let length = prompt.len() + tokens;
    for at in prompt.len()..length {
        let mut padded = ids.clone();
        padded.resize(length, 0);
        let batch = Batch::from_labels(1, length, padded.clone(), &padded, None, None).unwrap();
        let logits = model.forward(&batch, false).unwrap().logits;
        let vocabulary = logits.shape[2];
        let row = &logits.to_f32()[(at - 1) * vocabulary..at * vocabulary];
        let best = (0..vocabulary).max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a))).unwrap();
        ids.push(best as i32);
    }
    ids[prompt.len()..].to_vec()
}

fn prompt(length: usize, seed: usize) -> Vec<i32> {
    (0..length).map(|i| ((i * 37 + seed * 101 + 5) % 250) as i32).collect()
}

#[test]
fn the_cache_gives_the_tokens_of_whole_rows() {
    for name in ["llama", "qwen3"] {
        let mut model = Model::load(device(), source(name), None, DType::F32).unwrap();
        let mut generator = generator(name);
        for length in [1, 16, 21] {
            let ids = prompt(length, length);
            let expected = by_whole_rows(&mut model, &ids, 24);
            let given = [("max_new_tokens", "24"), ("ignore_end_tokens", "true")];
            assert_eq!(answers(&mut generator, &[ids], &given), [expected], "{name} {length}");
        }
    }
}

#[test]
fn a_batch_gives_what_each_prompt_gives_alone() {
    let prompts: Vec<Vec<i32>> = [3, 40, 1, 17, 16, 33, 5].iter().map(|n| prompt(*n, *n)).collect();
    for drawing in [vec![], vec![("temperature", "1.0"), ("top_p", "0.95"), ("seed", "4")]] {
        let given: Vec<(&str, &str)> =
            [("max_new_tokens", "20"), ("ignore_end_tokens", "true")].into_iter().chain(drawing).collect();
        let mut generator = generator("llama");
        let alone: Vec<Vec<i32>> =
            prompts.iter().map(|ids| answers(&mut generator, std::slice::from_ref(ids), &given).remove(0)).collect();
        assert_eq!(answers(&mut generator, &prompts, &given), alone);
        // Fewer rows than prompts: pages go from one to the next.
        let few: Vec<(&str, &str)> = given.iter().copied().chain([("batch_size", "2")]).collect();
        assert_eq!(answers(&mut self::generator("llama"), &prompts, &few), alone);
    }
}

#[test]
fn prompts_that_begin_alike_are_read_once_and_answered_as_alone() {
    let common = prompt(70, 9);
    let prompts: Vec<Vec<i32>> = (0..24)
        .map(|i| match i % 4 {
            0 => common.clone(),
            1 => [&common[..50], &prompt(3, i)].concat(),
            2 => common[..65].to_vec(),
            _ => [&common[..], &prompt(20, i)].concat(),
        })
        .collect();
    let given = [("max_new_tokens", "8"), ("ignore_end_tokens", "true"), ("temperature", "1.0"), ("seed", "4")];
    let mut generator = generator("llama");
    let alone: Vec<Vec<i32>> =
        prompts.iter().map(|ids| answers(&mut generator, std::slice::from_ref(ids), &given).remove(0)).collect();
    assert_eq!(answers(&mut generator, &prompts, &given), alone);
    let few = [&given[..], &[("batch_size", "5")]].concat();
    assert_eq!(answers(&mut self::generator("llama"), &prompts, &few), alone);
    // One step for the prompt, then one for each of the tokens, for all of them.
    let asked = vec![Prompt::Ids(common[..65].to_vec()); 24];
    let mut generation = Generation::start(&mut generator, &asked, &options(&given)).unwrap();
    let mut steps = 0;
    while !generation.is_done() {
        generation.step(&mut generator).unwrap();
        steps += 1;
    }
    assert_eq!(steps, 9);
}

#[test]
fn prompts_are_added_while_others_are_answered() {
    let mut generator = generator("llama");
    let (long, short, other) = (prompt(20, 1), prompt(40, 2), prompt(9, 3));
    let given = |tokens| [("max_new_tokens", tokens), ("ignore_end_tokens", "true"), ("batch_size", "2")];
    let few = [&given("4")[..], &[("temperature", "1.0"), ("seed", "8")]].concat();
    let alone = [(&long, &given("30")[..]), (&short, &few), (&other, &given("4"))]
        .map(|(ids, given)| answers(&mut generator, std::slice::from_ref(ids), given).remove(0));
    let asked = |ids: &[i32]| vec![Ok(Prompt::Ids(ids.to_vec()).into())];
    let here = (false, Path::new("."));
    let mut of =
        Generation::begin_with_room(&mut generator, asked(&long), &options(&given("30")), here, (Some(64), 0)).unwrap();
    (0..5).for_each(|_| drop(of.step(&mut generator).unwrap()));
    assert_eq!(of.add(&mut generator, asked(&short), &options(&few), here, 0).unwrap(), Some(1));
    assert_eq!(of.add(&mut generator, asked(&other), &options(&given("4")), here, 0).unwrap(), Some(2));
    // More tokens than any sequence has room for.
    assert_eq!(of.add(&mut generator, asked(&long), &options(&given("60")), here, 0).unwrap(), None);
    let mut ended = Vec::new();
    while !of.is_done() {
        ended.extend(of.step(&mut generator).unwrap().iter().filter(|of| of.finish.is_some()).map(|of| of.prompt));
    }
    assert_eq!(ended, [1, 2, 0]);
    assert_eq!([0, 1, 2].map(|prompt| of.answer(prompt).to_vec()), alone);
    // What is forgotten ends, and its pages serve the next.
    assert_eq!(of.add(&mut generator, asked(&long), &options(&given("30")), here, 0).unwrap(), Some(3));
    of.step(&mut generator).unwrap();
    of.forget(3);
    assert!(of.is_done() && of.answer(3).is_empty());
    assert_eq!(of.add(&mut generator, asked(&other), &options(&given("4")), here, 0).unwrap(), Some(4));
    while !of.is_done() {
        of.step(&mut generator).unwrap();
    }
    assert_eq!(of.answer(4), alone[2]);
}

#[test]
fn answers_end_where_they_should() {
    let mut generator = generator("llama");
    let ids = prompt(9, 1);
    let all =
        answers(&mut generator, std::slice::from_ref(&ids), &[("max_new_tokens", "12"), ("ignore_end_tokens", "true")]);
    assert_eq!(all[0].len(), 12);
    let limit = generator.longest().unwrap();
    let long = prompt(limit - 3, 2);
    let given = [("max_new_tokens", "12"), ("ignore_end_tokens", "true")];
    assert_eq!(answers(&mut generator, &[long], &given)[0].len(), 3);
    for (ids, message) in [
        (prompt(limit, 3), format!("the prompt has {limit} tokens, and the model allows sequences of {limit}")),
        (vec![], "the prompt has no tokens".to_owned()),
        (vec![1, 100_000], "token id 100000 is outside of the vocabulary".to_owned()),
    ] {
        let error = Generation::start(&mut generator, &[Prompt::Ids(ids)], &options(&[])).err().unwrap().to_string();
        assert!(error.contains(&message), "{error}");
    }
}

#[test]
fn a_new_generation_ends_the_one_before() {
    let mut generator = generator("llama");
    let prompts = [Prompt::Ids(vec![1, 2])];
    let mut first = Generation::start(&mut generator, &prompts, &options(&[])).unwrap();
    first.step(&mut generator).unwrap();
    let mut second = Generation::start(&mut generator, &prompts, &options(&[])).unwrap();
    let error = first.step(&mut generator).unwrap_err().to_string();
    assert!(error.contains("another generation or batch was run"), "{error}");
    second.step(&mut generator).unwrap();
}

#[test]
fn batches_and_generations_share_the_weights() {
    let ids = prompt(21, 2);
    let given = [("max_new_tokens", "12"), ("ignore_end_tokens", "true")];
    let expected = answers(&mut generator("llama"), std::slice::from_ref(&ids), &given);
    let mut model = Model::load(device(), source("llama"), None, DType::F32).unwrap();
    let batch = Batch::from_labels(1, 21, ids.clone(), &ids, None, None).unwrap();
    let logits = model.forward(&batch, false).unwrap().logits;
    let mut generator = model.generator().unwrap();
    for _ in 0..2 {
        model.lend(&mut generator).unwrap();
        assert_eq!(answers(&mut generator, std::slice::from_ref(&ids), &given), expected);
        let mut open = Generation::start(&mut generator, &[Prompt::Ids(ids.clone())], &options(&given)).unwrap();
        model.take_back(&mut generator).unwrap();
        assert!(open.step(&mut generator).unwrap_err().to_string().contains("batch was run"));
        assert!(model.forward(&batch, false).unwrap().logits.bytes == logits.bytes);
        assert!(model.loss_and_gradients(&batch).unwrap().loss > 0.0);
    }
    // What reads nothing shows that they came from the device.
    let gone = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(root().join("tests/golden/llama").join(file), gone.path().join(file)).unwrap();
    }
    let ir = std::fs::read_to_string(root().join("crates/train/tests/ir/llama.json")).unwrap();
    let moved = Arc::new(ModelSource::open(gone.path(), &ir).unwrap());
    let mut model = Model::load(device(), moved, None, DType::F32).unwrap();
    let mut generator = model.generator().unwrap();
    model.forward(&batch, false).unwrap();
    std::fs::remove_file(gone.path().join("model.safetensors")).unwrap();
    model.lend(&mut generator).unwrap();
    assert_eq!(answers(&mut generator, &[ids], &given), expected);
}
