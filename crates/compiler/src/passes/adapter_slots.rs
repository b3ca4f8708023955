//! Several adapters of one base in the matrices of each module, side by side: a slot of as many ranks for each. Of the values
//! between the two matrices a token keeps those of its own slot; those of the others become 0 and add nothing.
//!
//! Knows tokens and ranks; not what is in a slot.

use std::collections::{BTreeMap, HashMap};

use graph::{Graph, Init, Node, Origin, ParameterId, Phase, ValueId};
use ops::{Append, Emit, id};
use tensor::Attrs;

use crate::CompileError;
use crate::adapter::{AdapterExceptions, AdapterOptions, RANKS_OF_SLOTS, SLOT_OF_TOKEN};

const TOKENS: &str = "input_ids";

pub(super) struct Slots {
    /// The factors of a token's values between the matrices: [B, T, ranks].
    factors: ValueId,
    /// The rows of what has a row for each token.
    rows: Vec<usize>,
    /// The place of the first linear that reads a value. What others add that read it is computed there, too, so that they can
    /// become one product.
    places: HashMap<ValueId, usize>,
    early: BTreeMap<usize, Vec<Node>>,
}

impl Slots {
    /// Adds the input and the table of ranks. Errors: options that slots do not support, and a model without tokens.
    pub fn new(graph: &mut Graph, count: usize, adapter: &AdapterOptions) -> Result<Slots, CompileError> {
        let is_plain = adapter.exceptions == AdapterExceptions::default() && adapter.parameters.is_empty();
        if count == 0 || !adapter.rank.is_multiple_of(count) || adapter.magnitudes || !is_plain {
            let text = format!("{count} adapters cannot share matrices of rank {}", adapter.rank);
            return Err(CompileError::Options(text));
        }
        let Some(tokens) = graph.input(TOKENS).map(|tokens| graph.value(tokens).value_type()) else {
            return Err(CompileError::Options(format!("{}: there is no input `{TOKENS}`", graph.name)));
        };
        let slots = graph.add_typed(SLOT_OF_TOKEN, &tokens, Origin::Input);
        graph.inputs.push(slots);
        let shape = vec![count + 1, adapter.rank];
        let ParameterId(index) = graph.add_parameter(RANKS_OF_SLOTS, shape, Init::Zeros, adapter.dtype);
        let table = &mut graph.parameters[index as usize];
        table.adapter = true;
        let table = table.value;
        let mut append = Append::new(graph, Phase::Forward);
        let factors = append.emit(id::EMBEDDING, &[slots, table], Attrs::new())[0];
        let early = BTreeMap::from([(0, append.nodes)]);
        Ok(Slots { factors, rows: graph.value(slots).shape.clone(), places: HashMap::new(), early })
    }

    /// The values between the matrices of a linear's adapters, `t` [B, T, ranks], of which each token keeps those of its own.
    /// `made`: the nodes that give `t`; `place`: that of the linear. Errors: a linear that is in no layer, or whose rows are no
    /// tokens.
    pub fn keep_own(
        &mut self,
        mut made: Append<'_>,
        linear: &Node,
        t: ValueId,
        place: usize,
    ) -> Result<ValueId, CompileError> {
        let rows = made.value(t).shape.split_last().map_or(&[][..], |(_, rows)| rows);
        // After the layers only the last token of a row is computed.
        if linear.layer.is_none() || rows != self.rows {
            let name = &made.value(linear.inputs[1]).name;
            return Err(CompileError::Options(format!("`{name}` is in no layer, or its rows are not the tokens")));
        }
        let kept = made.emit(id::MUL, &[t, self.factors], Attrs::new())[0];
        let place = *self.places.entry(linear.inputs[0]).or_insert(place);
        self.early.entry(place).or_default().append(&mut made.nodes);
        Ok(kept)
    }

    /// The nodes of the graph with those that were made for slots.
    pub fn placed(mut self, nodes: Vec<Node>) -> Vec<Node> {
        let mut result = Vec::with_capacity(nodes.len() * 2);
        for (place, node) in nodes.into_iter().enumerate() {
            result.extend(self.early.remove(&place).into_iter().flatten());
            result.push(node);
        }
        result
    }
}
