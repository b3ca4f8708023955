//! Dynamic loss scaling against recorded steps of `torch.amp.GradScaler`.

#[allow(dead_code, reason = "only the folder is needed: the recording is no file of tensors")]
use crate::golden;
use ops::evaluate::{Array, apply};
use serde_json::Value;
use tensor::Attrs;

#[test]
fn the_scale_goes_as_recorded() {
    let text = std::fs::read_to_string(golden::folder().join("precision/loss_scale.json")).unwrap();
    let recorded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&recorded["growth_factor"], &recorded["backoff_factor"]), (&Value::from(2.0), &Value::from(0.5)));
    let attrs = Attrs::new().with("growth_interval", recorded["growth_interval"].as_u64().unwrap());
    let number = |value: &Value| value.as_f64().unwrap() as f32;
    let mut state = vec![
        (vec![1], Array::Real(vec![number(&recorded["init_scale"])])),
        (vec![1], Array::Int(vec![0])),
        (vec![1], Array::Real(vec![f32::NAN])),
    ];
    let steps = recorded["steps"].as_array().unwrap();
    assert!(steps.len() == 30 && steps.iter().any(|step| step["found_inf"] == true));
    for step in steps {
        let applied = if step["found_inf"] == true { 0.0 } else { 1.0 };
        let op = ops::find("next_loss_scale").unwrap();
        apply::<f32>(op, &attrs, &[(&[1], &Array::Real(vec![applied]))], &mut state);
        let [(_, Array::Real(scale)), (_, Array::Int(count)), (_, Array::Real(used))] = &state[..] else {
            panic!("a scale, a count and the scale that was used")
        };
        assert_eq!((used[0], scale[0]), (number(&step["scale"]), number(&step["scale_after"])), "{step}");
        assert_eq!(i64::from(count[0]), step["growth_tracker"].as_i64().unwrap(), "{step}");
    }
}
