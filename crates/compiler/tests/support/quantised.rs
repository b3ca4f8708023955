//! Programs of recipes that quantise: loaded, prepared and run entry by entry, and how far their numbers are apart.
#![allow(dead_code)]

use compiler::{CompileOptions, compile};
use graph::Model;
use program::{Documents, EntryKind, Machine, Session, Variant, scalar};

use super::{fill, loaded, model, numbers};

/// Rows that are no multiple of 16: what is transposed or rotated is filled up.
pub const ODD: Variant = Variant { batch: 3, seq_len: 7, documents: Documents::Rows };

/// A program in the reference's memory with contents for everything that it reads; its codes are made.
pub fn prepared(options: &CompileOptions, machine: &Machine) -> Box<dyn Session> {
    prepared_of(&model(), options, machine)
}

/// The same of a model.
pub fn prepared_of(model: &Model, options: &CompileOptions, machine: &Machine) -> Box<dyn Session> {
    let mut session = loaded(compile(model, options, machine).unwrap());
    let program = session.program().clone();
    fill(session.as_mut(), 0);
    for (name, value) in
        [(scalar::LEARNING_RATE, 0.01), (scalar::BIAS_CORRECTION_1, 0.1), (scalar::BIAS_CORRECTION_2, 0.001)]
    {
        session.write(program.scalar(name).unwrap(), &f32::to_le_bytes(value)).unwrap();
    }
    session
}

pub fn run(session: &mut dyn Session, kind: EntryKind) {
    let variant = (kind != EntryKind::Update).then_some(ODD);
    let entry = session.program().entry(kind, variant).unwrap();
    session.run(entry).unwrap();
}

pub fn value(session: &mut dyn Session, name: &str) -> f32 {
    let at = session.program().scalar(name).unwrap().clone();
    numbers(session, &at)[0]
}

/// Norm of the difference by the norm of what is expected.
pub fn relative(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    difference / norm(&mut expected.iter().map(|x| f64::from(*x))).max(1e-9)
}
