//! Programs from graphs that are ready to be lowered, over one arena plan.

use graph::Graph;
use program::{EntryKind, Machine, Program, Variant};

use crate::error::CompileError;
use crate::load_groups::LoadGroups;
use crate::options::CompileOptions;
use crate::pass::Passes;
use crate::{lower, memory, plan};

/// Compiles graphs that are ready to be lowered. The first has the parameters of all.
pub(crate) fn compile_graphs(
    name: &str,
    graphs: &[(EntryKind, Variant, Graph)],
    options: &CompileOptions,
    machine: &Machine,
    passes: &mut Passes<'_>,
) -> Result<Program, CompileError> {
    let options = &passes.allowed(options);
    let table = &graphs.first().expect("at least one entry is requested").2;
    let sharded = |options: &CompileOptions| {
        let load_groups = LoadGroups::find(graphs, options);
        let known = plan::Known::default();
        let placed = |options: &CompileOptions| {
            memory::plan_parameters(table, memory::plan_states(graphs, options), &load_groups, options)
        };
        let mut nodes_of_first = Vec::new();
        let compiled = |options: &CompileOptions, rivals: Option<plan::Rivals<'_>>| {
            // Codes have an arena of their own on the host.
            let parameters = placed(options);
            let memory = plan::Memory::new(graphs, &parameters, options, machine);
            let outlook = plan::outlook(graphs, &memory, options, machine, &known)?;
            if let Some(needed) = outlook.as_ref().and_then(plan::Outlook::excess) {
                return Err(memory.does_not_fit(needed, options));
            }
            if rivals.zip(outlook.as_ref()).is_some_and(|(rivals, of)| rivals.are_faster_than(of)) {
                return Ok(None);
            }
            let mut graphs = graphs.to_vec();
            // What is kept, recomputed, offloaded or done in parts. Nothing may share computations after it.
            let plan = plan::decide(&mut graphs, &memory, options, machine, &known, passes)?;
            // Recomputation that is fused where it fits is no decision, and leaves fewer nodes.
            let nodes: Vec<usize> = graphs.iter().map(|(_, _, graph)| graph.nodes.len()).collect();
            match rivals.and_then(|rivals| rivals.first) {
                None if rivals.is_none() => nodes_of_first = nodes,
                Some(first) if nodes == nodes_of_first && plan::chooses_the_same(first, &plan) => return Ok(None),
                _ => {}
            }
            let program = lower::program(name, graphs, &parameters, plan, options, machine)?;
            Ok(Some(plan::Candidate { program, outlook }))
        };
        // States that only the update needs may lie on the host, as may codes of frozen weights: of the programs that
        // this makes, the one with the shortest step is taken. Codes on the device are among the weights.
        let mut offloaded = options.clone();
        offloaded.plan.offload.quants = Some(true);
        let parameters = placed(&offloaded);
        plan::least_step(options, machine, |arena| parameters.bytes(arena).unwrap_or(0), compiled)
    };
    // Several ranks may each keep only their shards of more than the states.
    let program = plan::nearest_scope(options, sharded)?;
    lower::check(&program);
    Ok(program)
}
