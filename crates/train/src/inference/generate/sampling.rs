//! The draw of the next token of a sequence: its parameters for the device, and the same draw on the host for logits that a
//! penalty or masks have changed. Does not know where scores come from.

use compiler::sampling::{Draw, log_probability, sample};
use tensor::philox::{Purpose, unit, word};

use super::settings::Settings;

/// The random draw for the token at index `tokens` of a sequence.
pub fn draw_after(tokens: usize, settings: &Settings) -> Draw {
    Draw { number: unit(word(settings.seed, Purpose::Generation, 0, 0, tokens as u64)), ..settings.draw }
}

/// The token that follows a sequence, of which the first `prompt` ids are the prompt and which may have `most`, once the
/// logits are changed as the settings say; with its log-probability among all tokens before they are.
pub fn next_of_changed(logits: &[f32], (ids, prompt): (&[i32], usize), most: usize, settings: &Settings) -> (u32, f32) {
    let how = draw_after(ids.len(), settings);
    let mut changed = penalise(logits, ids, settings.repetition_penalty);
    settings.masks.apply(&mut changed, (ids, prompt), &settings.end_tokens, most);
    let (id, _) = sample(&changed, &how);
    (id, if settings.keeps_logps { log_probability(logits, &how, id) } else { 0.0 })
}

fn penalise(logits: &[f32], there: &[i32], penalty: f32) -> Vec<f32> {
    let mut changed = logits.to_vec();
    for id in there {
        let (from, to) = (logits[*id as usize], &mut changed[*id as usize]);
        *to = if from > 0.0 { from / penalty } else { from * penalty };
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::super::defaults::Defaults;
    use super::super::settings::GenerationOptions;
    use super::*;

    fn settings(draw: Draw) -> Settings {
        let options = GenerationOptions::read(&[("seed".into(), "3".into())]).unwrap();
        Settings { draw, ..Settings::of(&options, &Defaults::default(), vec![]).unwrap() }
    }

    #[test]
    fn repeated_tokens_become_less_likely() {
        let mut of = settings(Draw { temperature: 0.0, ..Draw::ALL });
        let next = |logits: &[f32], ids: &[i32], of: &Settings| next_of_changed(logits, (ids, 0), 9, of).0;
        assert_eq!(next(&[1.0, 1.0], &[], &of), 0);
        of.repetition_penalty = 2.0;
        assert_eq!(next(&[3.0, 2.0, -1.0], &[], &of), 0);
        assert_eq!(next(&[3.0, 2.0, -1.0], &[0, 0], &of), 1);
        assert_eq!(next(&[-3.0, -2.0, -2.5], &[1], &of), 2);
        of.masks.never = vec![1];
        assert_eq!(next(&[3.0, 2.0, -1.0], &[0], &of), 0, "what is taken out stays out");
    }

    #[test]
    fn log_probabilities_are_those_before_a_change() {
        let of =
            Settings { repetition_penalty: 2.0, keeps_logps: true, ..settings(Draw { temperature: 2.0, ..Draw::ALL }) };
        let logits = [2.0, 4.0, 0.0];
        let (id, logp) = next_of_changed(&logits, (&[1], 0), 9, &of);
        let total = 1f64.exp() + 2f64.exp() + 1.0;
        assert!((f64::from(logp) - (f64::from(logits[id as usize]) / 2.0 - total.ln())).abs() < 1e-6);
    }

    #[test]
    fn a_number_belongs_to_seed_and_position() {
        let of = settings(Draw::ALL);
        let numbers = |of: &Settings| (0..50).map(|position| draw_after(position, of).number).collect::<Vec<_>>();
        assert_eq!(numbers(&of), numbers(&of));
        assert_ne!(numbers(&of), numbers(&Settings { seed: 4, ..of.clone() }));
        assert!(numbers(&of).iter().all(|number| (0.0..1.0).contains(number)));
    }
}
