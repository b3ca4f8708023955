//! Runs a pass, verifies what it left, and tells an observer. Dumping, timing by
//! the caller, stopping after a pass and bisection need nothing in the passes themselves.

use graph::Graph;

use crate::CompileError;

/// What an observer sees after each pass.
pub struct PassTrace<'a> {
    pub pass: &'static str,
    pub index: usize,
    /// False when the pass was skipped by the limit.
    pub ran: bool,
    pub graph: &'a Graph,
}

/// Called after each pass.
pub type Observer<'a> = Box<dyn FnMut(PassTrace<'_>) + 'a>;

/// Passes that only make a graph better; a limit may skip them. The others change what the graph
/// means and always run.
const OPTIONAL: &[&str] = &["merge_linears", "common_subexpressions", "dead_code", "fuse"];

/// How passes are run. The default only verifies.
#[derive(Default)]
pub struct Passes<'a> {
    observer: Option<Observer<'a>>,
    /// Optional passes that may still run, for finding the one that breaks a result.
    limit: Option<usize>,
    count: usize,
}

impl<'a> Passes<'a> {
    pub fn observed(observer: Observer<'a>) -> Self {
        Passes { observer: Some(observer), ..Self::default() }
    }

    /// Runs only the first `limit` optional passes: bisection over the pass list.
    pub fn limited(limit: usize) -> Self {
        Passes { limit: Some(limit), ..Self::default() }
    }

    pub(crate) fn run(
        &mut self,
        pass: &'static str,
        graph: &mut Graph,
        rewrite: impl FnOnce(&mut Graph) -> Result<(), CompileError>,
    ) -> Result<(), CompileError> {
        let skipped = OPTIONAL.contains(&pass) && self.take_from_limit();
        if !skipped {
            rewrite(graph)?;
            self.check(pass, graph)?;
        }
        let index = self.count;
        self.count += 1;
        if let Some(observer) = &mut self.observer {
            observer(PassTrace { pass, index, ran: !skipped, graph });
        }
        Ok(())
    }

    fn take_from_limit(&mut self) -> bool {
        match &mut self.limit {
            None => false,
            Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
        }
    }

    /// Structure and shapes. After the first stage the model is to blame, later the pass is.
    pub(crate) fn check(&self, pass: &'static str, graph: &Graph) -> Result<(), CompileError> {
        let result = graph::verify(graph).and_then(|()| ops::verify(graph));
        match result {
            Ok(()) => Ok(()),
            Err(message) if pass == "expand" => Err(CompileError::Model(message)),
            Err(message) => panic!("pass `{pass}` left a graph that does not verify: {message}\n{graph}"),
        }
    }
}
