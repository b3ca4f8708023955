//! Estimates of a run on several nodes of GPUs, computed from the plan of one node and the rate between nodes. No such
//! run was measured.
//!
//! Knows sizes and rates; not what is exchanged inside a node, which is in the plan of one.

use compiler::Blocks;
use program::{Arch, Machine, ParameterSlot};
use serde_json::{Value, json};

use super::Preview;
use crate::config::{Config, GradientCompression};
use crate::error::{Result, TrainError};
use crate::input::encoded::Encoded;
use crate::model::source::ModelSource;
use crate::words::{size, time};

/// GPUs of the largest run that is computed, unless a larger one is requested.
const MOST: usize = 1024;

/// Columns of the bar chart.
const PICTURE: f64 = 20.0;

/// The estimate for one number of GPUs.
#[derive(Clone, Debug, PartialEq)]
struct Size {
    nodes: usize,
    gpus: usize,
    /// Bytes of each GPU that the plan holds.
    memory: usize,
    /// Bytes that each GPU gets in a step: from those of its node, and from its counterparts on other nodes.
    inside: f64,
    between: f64,
    /// Seconds of a step in which nothing is computed because bytes are on their way.
    waiting: f64,
    step: f64,
    tokens_per_second: f64,
}

/// Several nodes of one kind.
pub struct Across {
    nodes: usize,
    /// GPUs of each node.
    gpus: usize,
    /// Between nodes, bytes a second for each GPU.
    network: f64,
    sizes: Vec<Size>,
    /// The type in which gradients travel.
    sent: &'static str,
    /// The name of a device.
    device: &'static str,
}

impl Across {
    /// Plans for a part of a node, for a node, and from there on computes. Sizes whose plan does not fit are left out.
    pub fn new(
        config: &Config,
        source: &ModelSource,
        machine: &Machine,
        data: Option<&Encoded>,
        (nodes, gpus, network): (usize, usize, f64),
    ) -> Result<Across> {
        let mut sizes = Vec::new();
        let parts = doubled(1).take_while(|count| *count < gpus).chain([gpus]);
        for count in parts {
            let mut of = config.of_one_node().with_gpus(count as u32).map_err(TrainError::Config)?;
            if count == 1 {
                // Between GPUs only.
                of.sharding.gradient_compression = GradientCompression::None;
            }
            let preview = match Preview::new(&of, source, machine, data) {
                Err(TrainError::Memory(_)) if count < gpus => continue,
                preview => preview?,
            };
            let estimate = preview.estimate();
            let one = Size {
                nodes: 1,
                gpus: count,
                memory: preview.memory_bytes(),
                inside: estimate.exchanged,
                between: 0.0,
                waiting: estimate.waiting,
                step: estimate.step_seconds,
                tokens_per_second: estimate.tokens_per_second,
            };
            if count == gpus {
                let trained = trained_elements(&preview);
                let most = (MOST / gpus).max(nodes);
                let mut counts: Vec<usize> = doubled(2).take_while(|count| *count <= most).chain([nodes]).collect();
                counts.sort_unstable();
                counts.dedup();
                sizes.push(one.clone());
                let compression = config.sharding.gradient_compression;
                sizes.extend(counts.into_iter().map(|nodes| one.on(nodes, trained, compression, network)));
            } else {
                sizes.push(one);
            }
        }
        let sent = match config.sharding.gradient_compression {
            GradientCompression::None => "f32",
            GradientCompression::BFloat16 => "bf16",
            GradientCompression::Int8 => "int8",
            GradientCompression::TopK => "topk",
            GradientCompression::OneBit => "onebit",
        };
        let device = if machine.arch == Arch::Cpu { "rank" } else { "GPU" };
        Ok(Across { nodes, gpus, network, sizes, sent, device })
    }

    /// A table, with a picture of the rate for each GPU.
    pub fn text(&self) -> String {
        let rate = self.network / 1e9;
        let mut text = format!(
            "\n{} nodes of {} {of}s, {rate} GB/s between nodes for each {of}. Computed from the plan of one node, not measured: a \
             step\nhas as many more rows; gradients are summed in a node, then once a step between nodes, in {}, without \
             latencies.\n",
            self.nodes,
            self.gpus,
            self.sent,
            of = self.device
        );
        text += &format!(
            "{:>6}s  nodes     memory    in a node    between      waits       step     tokens/s  of linear\n",
            self.device
        );
        for of in &self.sizes {
            let share = self.share(of);
            let bar = "█".repeat((share * PICTURE).round() as usize);
            let mark = if (of.nodes, of.gpus) == (self.nodes, self.nodes * self.gpus) { '*' } else { ' ' };
            let line = format!(
                "{mark}{:>6} {:>6} {:>10} {:>12} {:>10} {:>10} {:>10} {:>12.0} {:>8.1} % {bar}",
                of.gpus,
                of.nodes,
                size(of.memory),
                size(of.inside as usize),
                size(of.between as usize),
                time(of.waiting),
                time(of.step),
                of.tokens_per_second,
                100.0 * share,
            );
            text += &(line + "\n");
        }
        text
    }

    pub fn to_json(&self) -> Value {
        let row = |of: &Size| {
            json!({
                "gpus": of.gpus, "nodes": of.nodes, "memory_bytes": of.memory, "inside_bytes": of.inside,
                "between_bytes": of.between, "waiting_seconds": of.waiting, "step_seconds": of.step,
                "tokens_per_second": of.tokens_per_second, "share_of_linear": self.share(of),
            })
        };
        json!({
            "meaning": "computed from the plan of one node, not measured",
            "nodes": self.nodes,
            "gpus": self.gpus,
            "bytes_per_second": self.network,
            "sizes": self.sizes.iter().map(row).collect::<Vec<Value>>(),
        })
    }

    /// The rate for each GPU, as a share of that of the smallest run.
    fn share(&self, of: &Size) -> f64 {
        let each = |of: &Size| of.tokens_per_second / of.gpus as f64;
        each(of) / each(&self.sizes[0])
    }
}

impl Size {
    /// The estimate for `nodes` nodes like this one. The update waits for the exchange between them.
    fn on(&self, nodes: usize, trained: f64, compression: GradientCompression, network: f64) -> Size {
        let between = between(trained, compression, self.gpus, nodes);
        let exposed = between / network;
        let step = self.step + exposed;
        Size {
            nodes,
            gpus: nodes * self.gpus,
            between,
            waiting: self.waiting + exposed,
            step,
            tokens_per_second: self.tokens_per_second * nodes as f64 * self.step / step,
            ..self.clone()
        }
    }
}

/// Bytes that a GPU gets from other nodes in a step, of its share of the gradients: once to add, once the sums; of
/// sparse blocks those of all nodes.
fn between(trained: f64, compression: GradientCompression, gpus: usize, nodes: usize) -> f64 {
    let blocks = |of: Blocks| of.bytes(1 << 20) as f64 / (1 << 20) as f64;
    let (each, others) = (trained / gpus as f64, (nodes - 1) as f64);
    let twice = 2.0 * others / nodes as f64 * each;
    match compression {
        GradientCompression::None => 4.0 * twice,
        GradientCompression::BFloat16 => 2.0 * twice,
        GradientCompression::Int8 => blocks(Blocks::Int8) * twice,
        GradientCompression::TopK => blocks(Blocks::TopK) * others * each,
        GradientCompression::OneBit => blocks(Blocks::OneBit) * twice,
    }
}

/// Elements of all trained weights.
fn trained_elements(preview: &Preview) -> f64 {
    let slots = preview.program.layout.parameters.iter().filter(|slot| slot.trainable);
    slots.map(ParameterSlot::elements).sum::<usize>() as f64
}

fn doubled(from: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(from), |count| Some(count * 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_gpu_gets_from_other_nodes_is_its_share_twice() {
        // 32 GB of gradients, 8 GPUs of 2 nodes: 2 · 1/2 · 32 / 8 GB.
        let whole = |trained, gpus, nodes| between(trained, GradientCompression::None, gpus, nodes);
        assert_eq!(whole(8e9, 8, 2), 4e9);
        assert!((whole(8e9, 8, 128) - 7.9375e9).abs() < 1.0);
        assert_eq!(whole(1e6, 1, 2), 4e6);
        // 260 and 36 bytes for 256, twice 3/4 of them, and 80 bytes of each of three others.
        assert_eq!(between(256e6, GradientCompression::Int8, 1, 4), 390e6);
        assert_eq!(between(256e6, GradientCompression::TopK, 1, 4), 240e6);
        assert_eq!(between(256e6, GradientCompression::OneBit, 1, 4), 54e6);
    }
}
