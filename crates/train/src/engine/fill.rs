//! The order in which the parameters of a session are written.

use program::{ParameterSlot, Program, Session};

use crate::error::Result;

/// Writes the `wanted` parameters of a program, all of those that are loaded together or none. Makes codes of those that are
/// in memory only while they are loaded, so that the next may take their place.
pub fn fill(
    session: &mut dyn Session,
    program: &Program,
    wanted: impl Fn(&ParameterSlot) -> bool,
    mut write: impl FnMut(&mut dyn Session, &ParameterSlot) -> Result<()>,
) -> Result<()> {
    for (group, slots) in program.layout.in_order() {
        let mut written = false;
        for slot in slots.into_iter().filter(|slot| wanted(slot)) {
            write(session, slot)?;
            written = true;
        }
        if let Some(entry) = group.filter(|_| written).map(|group| program.preparation(Some(group))) {
            session.run(entry.expect("what is only loaded is loaded to be prepared"))?;
        }
    }
    Ok(())
}
