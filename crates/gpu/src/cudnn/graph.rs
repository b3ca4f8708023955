//! Graphs of tensor operations, compiled by cuDNN into one execution plan. Knows nothing of attention.
#![allow(unsafe_code, reason = "calls of cuDNN through its function table")]

use super::descriptor::Descriptor;
use super::{Cudnn, Handle};
use crate::disk_cache::{DiskCache, digest};
use crate::error::{Error, Result};
use crate::sys::cudnn::{self as sys, attribute as at, data_type, descriptor as kind, pointwise, value_type};
use std::fmt::Write;
use std::sync::Arc;

/// The target that a plan is compiled for.
pub enum Target<'a> {
    /// The GPU of a live handle.
    Device(&'a Handle),
    /// A GPU that is not present, described as JSON: checks on a machine without one.
    Described(&'a str),
}

impl Target<'_> {
    /// Returns the text that distinguishes this GPU from others.
    fn device(&self) -> &str {
        match self {
            Target::Device(handle) => &handle.device,
            Target::Described(json) => json,
        }
    }
}

/// A four-dimensional tensor of a graph, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node(usize);

pub(super) type Dims = [i64; 4];

/// Strides of a dense tensor.
pub(super) fn dense([_, b, c, d]: Dims) -> Dims {
    [b * c * d, c * d, d, 1]
}

/// A tensor before it is described to cuDNN.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub data_type: u32,
    pub dims: Dims,
    pub strides: Dims,
}

impl Tensor {
    pub fn new(data_type: u32, dims: Dims, strides: Dims) -> Tensor {
        Tensor { data_type, dims, strides }
    }
}

/// Ids from here on belong to tensors that the graph makes for itself.
const FIRST_OWN_ID: i64 = 1000;

/// A graph under construction. Operations are described to cuDNN as they are added.
pub(super) struct Graph {
    cudnn: Arc<Cudnn>,
    tensors: Vec<Descriptor>,
    shapes: Vec<(Dims, Dims)>,
    operations: Vec<Descriptor>,
    /// By-value scalars: id and bits.
    scalars: Vec<(i64, Box<u32>)>,
    next_id: i64,
    /// Every tensor and operation in words: the key of a stored plan.
    description: String,
}

impl Graph {
    pub fn new(cudnn: &Arc<Cudnn>) -> Graph {
        Graph {
            cudnn: cudnn.clone(),
            tensors: vec![],
            shapes: vec![],
            operations: vec![],
            scalars: vec![],
            next_id: FIRST_OWN_ID,
            description: String::new(),
        }
    }

    /// A tensor in memory; `id` binds its address when the plan runs.
    pub fn memory(&mut self, id: i64, tensor: Tensor) -> Result<Node> {
        self.tensor(id, tensor, false, false)
    }

    /// A tensor that exists only inside the plan's kernels.
    pub fn inside(&mut self, tensor: Tensor) -> Result<Node> {
        let id = self.own_id();
        self.tensor(id, tensor, true, false)
    }

    /// A dense f32 tensor inside the plan.
    pub fn inside_f32(&mut self, dims: Dims) -> Result<Node> {
        self.inside(Tensor::new(data_type::FLOAT, dims, dense(dims)))
    }

    pub fn scalar(&mut self, value: f32) -> Result<Node> {
        let id = self.own_id();
        self.scalars.push((id, Box::new(value.to_bits())));
        self.tensor(id, Tensor::new(data_type::FLOAT, [1; 4], [1; 4]), false, true)
    }

    fn own_id(&mut self) -> i64 {
        self.next_id += 1;
        self.next_id
    }

    fn describe(&mut self, line: std::fmt::Arguments) {
        writeln!(self.description, "{line}").expect("a string takes every line");
    }

    fn tensor(&mut self, id: i64, tensor: Tensor, inside: bool, by_value: bool) -> Result<Node> {
        self.describe(format_args!("tensor {id} {tensor:?} inside {inside} by value {by_value}"));
        let d = Descriptor::new(&self.cudnn, kind::TENSOR)?
            .data_type(at::TENSOR_DATA_TYPE, tensor.data_type)?
            .int64(at::TENSOR_DIMENSIONS, &tensor.dims)?
            .int64(at::TENSOR_STRIDES, &tensor.strides)?
            .int64(at::TENSOR_UNIQUE_ID, &[id])?
            .int64(at::TENSOR_BYTE_ALIGNMENT, &[16])?
            .flag(at::TENSOR_IS_VIRTUAL, inside)?
            .flag(at::TENSOR_IS_BY_VALUE, by_value)?;
        self.tensors.push(d.finalise("a tensor")?);
        self.shapes.push((tensor.dims, tensor.strides));
        Ok(Node(self.tensors.len() - 1))
    }

    /// y = mode(x[, b][, t]); for a select, t is the condition and x, b the two values.
    pub fn pointwise_into(
        &mut self,
        mode: u32,
        precision: u32,
        x: Node,
        b: Option<Node>,
        t: Option<Node>,
        y: Node,
    ) -> Result<()> {
        self.describe(format_args!("pointwise {mode} {precision}"));
        let p = self.pointwise_kind(mode, precision)?.finalise("a pointwise kind")?;
        self.pointwise_operation(&p, x, b, t, y)
    }

    /// Like x in shape, f32, inside the plan.
    pub fn pointwise(&mut self, mode: u32, x: Node, b: Option<Node>) -> Result<Node> {
        let (dims, strides) = self.shapes[x.0];
        let y = self.inside(Tensor::new(data_type::FLOAT, dims, strides))?;
        self.pointwise_into(mode, data_type::FLOAT, x, b, None, y)?;
        Ok(y)
    }

    /// The index of every element along one axis, as i32.
    pub fn index(&mut self, like: Node, axis: i64) -> Result<Node> {
        let (dims, strides) = self.shapes[like.0];
        let y = self.inside(Tensor::new(data_type::INT32, dims, strides))?;
        self.describe(format_args!("index along {axis}"));
        let p = self
            .pointwise_kind(pointwise::GEN_INDEX, data_type::INT32)?
            .int64(at::POINTWISE_AXIS, &[axis])?
            .finalise("a pointwise kind")?;
        self.pointwise_operation(&p, like, None, None, y)?;
        Ok(y)
    }

    /// A boolean tensor shaped like a.
    pub fn compare(&mut self, mode: u32, a: Node, b: Node) -> Result<Node> {
        let (dims, strides) = self.shapes[a.0];
        let y = self.inside(Tensor::new(data_type::BOOLEAN, dims, strides))?;
        self.pointwise_into(mode, data_type::BOOLEAN, a, Some(b), None, y)?;
        Ok(y)
    }

    /// x where the mask holds, elsewhere the scalar.
    pub fn select(&mut self, mask: Node, x: Node, otherwise: Node) -> Result<Node> {
        let (dims, strides) = self.shapes[x.0];
        let y = self.inside(Tensor::new(data_type::FLOAT, dims, strides))?;
        self.pointwise_into(pointwise::BINARY_SELECT, data_type::FLOAT, x, Some(otherwise), Some(mask), y)?;
        Ok(y)
    }

    fn pointwise_kind(&self, mode: u32, precision: u32) -> Result<Descriptor> {
        Descriptor::new(&self.cudnn, kind::POINTWISE)?
            .set(at::POINTWISE_MODE, value_type::POINTWISE_MODE, &[mode])?
            .data_type(at::POINTWISE_MATH_PREC, precision)
    }

    fn pointwise_operation(
        &mut self,
        p: &Descriptor,
        x: Node,
        b: Option<Node>,
        t: Option<Node>,
        y: Node,
    ) -> Result<()> {
        self.describe(format_args!("of {x:?} {b:?} {t:?} to {y:?}"));
        let mut o = Descriptor::new(&self.cudnn, kind::OPERATION_POINTWISE)?
            .descriptor(at::OPERATION_POINTWISE_PW_DESCRIPTOR, p)?
            .descriptor(at::OPERATION_POINTWISE_XDESC, &self.tensors[x.0])?;
        for (attribute, node) in [(at::OPERATION_POINTWISE_BDESC, b), (at::OPERATION_POINTWISE_TDESC, t)] {
            if let Some(node) = node {
                o = o.descriptor(attribute, &self.tensors[node.0])?;
            }
        }
        let o = o.descriptor(at::OPERATION_POINTWISE_YDESC, &self.tensors[y.0])?;
        self.operations.push(o.finalise("a pointwise operation")?);
        Ok(())
    }

    /// Reduces x over the axes in which y has extent 1 (or, for heads, divides x's).
    pub fn reduce(&mut self, operator: u32, x: Node, y: Node) -> Result<()> {
        self.describe(format_args!("reduce {operator} {x:?} to {y:?}"));
        let r = Descriptor::new(&self.cudnn, kind::REDUCTION)?
            .set(at::REDUCTION_OPERATOR, value_type::REDUCTION_OPERATOR, &[operator])?
            .data_type(at::REDUCTION_COMP_TYPE, data_type::FLOAT)?
            .finalise("a reduction kind")?;
        let o = Descriptor::new(&self.cudnn, kind::OPERATION_REDUCTION)?
            .descriptor(at::OPERATION_REDUCTION_DESC, &r)?
            .descriptor(at::OPERATION_REDUCTION_XDESC, &self.tensors[x.0])?
            .descriptor(at::OPERATION_REDUCTION_YDESC, &self.tensors[y.0])?;
        self.operations.push(o.finalise("a reduction")?);
        Ok(())
    }

    /// c = a·b over the last two axes, f32 accumulation.
    pub fn matmul(&mut self, a: Node, b: Node, c: Node) -> Result<()> {
        self.describe(format_args!("matmul {a:?} {b:?} to {c:?}"));
        let m = Descriptor::new(&self.cudnn, kind::MATMUL)?
            .data_type(at::MATMUL_COMP_TYPE, data_type::FLOAT)?
            .finalise("a matmul kind")?;
        let o = Descriptor::new(&self.cudnn, kind::OPERATION_MATMUL)?
            .descriptor(at::OPERATION_MATMUL_ADESC, &self.tensors[a.0])?
            .descriptor(at::OPERATION_MATMUL_BDESC, &self.tensors[b.0])?
            .descriptor(at::OPERATION_MATMUL_CDESC, &self.tensors[c.0])?
            .descriptor(at::OPERATION_MATMUL_DESC, &m)?;
        self.operations.push(o.finalise("a matmul")?);
        Ok(())
    }

    /// The stored plan, or one compiled with the first engine of the heuristic that accepts the graph,
    /// which is then stored. `what` is named when cuDNN rejects.
    pub fn plan(self, target: &Target, plans: &DiskCache, what: &str) -> Result<Plan> {
        let described = match target {
            Target::Device(_) => None,
            Target::Described(json) => Some(
                Descriptor::new(&self.cudnn, kind::DEVICEPROP)?
                    .set(at::DEVICEPROP_JSON_REPRESENTATION, value_type::CHAR, json.as_bytes())?
                    .finalise("a device description")?,
            ),
        };
        let (version, device) = (self.cudnn.version().to_le_bytes(), target.device());
        let name = format!("{}.plan", digest(&[&version, device.as_bytes(), self.description.as_bytes()]));
        let stored = plans.read(&name).and_then(|text| {
            // A plan that this library rejects is built again.
            let plan = self.empty_plan(target, described.as_ref()).ok()?;
            plan.set(at::EXECUTION_PLAN_JSON_REPRESENTATION, value_type::CHAR, &text).ok()?.finalise("a plan").ok()
        });
        let from_disk = stored.is_some();
        let plan = match stored {
            Some(plan) => plan,
            None => self.compile(target, described.as_ref(), what)?,
        };
        // Some engines cannot be written down; their plans are built at every start.
        if !from_disk && let Ok(text) = plan.get_text(at::EXECUTION_PLAN_JSON_REPRESENTATION) {
            plans.write(&name, &text);
        }
        let workspace = plan.get_int64(at::EXECUTION_PLAN_WORKSPACE_SIZE)? as usize;
        Ok(Plan { plan, workspace, from_disk, scalars: self.scalars, cudnn: self.cudnn })
    }

    fn empty_plan(&self, target: &Target, described: Option<&Descriptor>) -> Result<Descriptor> {
        let plan = Descriptor::new(&self.cudnn, kind::EXECUTION_PLAN)?;
        match (target, described) {
            (Target::Device(handle), _) => plan.set(at::EXECUTION_PLAN_HANDLE, value_type::HANDLE, &[handle.raw]),
            (_, Some(device)) => plan.descriptor(at::EXECUTION_PLAN_DEVICEPROP, device),
            (_, None) => unreachable!("a described target has its description"),
        }
    }

    fn compile(&self, target: &Target, described: Option<&Descriptor>, what: &str) -> Result<Descriptor> {
        let graph = self.operation_graph(target)?;
        let configurations = self.configurations(&graph, described)?;
        let mut refusal = None;
        for configuration in &configurations {
            let plan = self.empty_plan(target, described)?;
            match plan.descriptor(at::EXECUTION_PLAN_ENGINE_CONFIG, configuration)?.finalise("a plan") {
                Ok(plan) => return Ok(plan),
                Err(error) => refusal = Some(error),
            }
        }
        let reason = match refusal {
            Some(error) => format!("none of cuDNN's {} engines supports it; last error: {error}", configurations.len()),
            None => "cuDNN knows no engine for it".into(),
        };
        Err(Error::Unsupported { what: what.to_owned(), reason, context: String::new() })
    }

    fn operation_graph(&self, target: &Target) -> Result<Descriptor> {
        let operations: Vec<sys::Descriptor> = self.operations.iter().map(|o| o.raw()).collect();
        let graph = Descriptor::new(&self.cudnn, kind::OPERATIONGRAPH)?.set(
            at::OPERATIONGRAPH_OPS,
            value_type::BACKEND_DESCRIPTOR,
            &operations,
        )?;
        match target {
            Target::Device(handle) => graph.set(at::OPERATIONGRAPH_HANDLE, value_type::HANDLE, &[handle.raw])?,
            Target::Described(_) => graph,
        }
        .finalise("an operation graph")
    }

    fn configurations(&self, graph: &Descriptor, described: Option<&Descriptor>) -> Result<Vec<Descriptor>> {
        let mut heuristic = Descriptor::new(&self.cudnn, kind::ENGINEHEUR)?
            .descriptor(at::ENGINEHEUR_OPERATION_GRAPH, graph)?
            .set(at::ENGINEHEUR_MODE, value_type::HEUR_MODE, &[sys::HEURISTIC_MODE_A])?;
        if let Some(device) = described {
            heuristic = heuristic.descriptor(at::ENGINEHEUR_DEVICEPROP, device)?;
        }
        let heuristic = heuristic.finalise("a heuristic")?;
        let mut configurations =
            (0..8).map(|_| Descriptor::new(&self.cudnn, kind::ENGINECFG)).collect::<Result<Vec<_>>>()?;
        let found = heuristic.get_descriptors(at::ENGINEHEUR_RESULTS, &configurations)?;
        configurations.truncate(found);
        Ok(configurations)
    }
}

/// A compiled graph with its workspace size.
pub struct Plan {
    cudnn: Arc<Cudnn>,
    plan: Descriptor,
    workspace: usize,
    from_disk: bool,
    scalars: Vec<(i64, Box<u32>)>,
}

impl Plan {
    /// True if the plan was stored by an earlier start.
    pub fn from_disk(&self) -> bool {
        self.from_disk
    }

    /// Bytes of workspace that a run needs.
    pub fn workspace(&self) -> usize {
        self.workspace
    }

    /// Binds addresses to the graph's ids; made once, run many times.
    pub fn bind(&self, addresses: &[(i64, u64)], workspace: u64) -> Result<Binding> {
        let mut ids: Vec<i64> = addresses.iter().map(|(id, _)| *id).collect();
        let mut pointers: Vec<u64> = addresses.iter().map(|(_, address)| *address).collect();
        for (id, value) in &self.scalars {
            ids.push(*id);
            pointers.push(&raw const **value as u64);
        }
        let pack = Descriptor::new(&self.cudnn, kind::VARIANT_PACK)?
            .set(at::VARIANT_PACK_DATA_POINTERS, value_type::VOID_PTR, &pointers)?
            .int64(at::VARIANT_PACK_UNIQUE_IDS, &ids)?
            .set(at::VARIANT_PACK_WORKSPACE, value_type::VOID_PTR, &[workspace])?
            .finalise("a variant pack")?;
        Ok(Binding { pack })
    }

    /// Queues the plan on the handle's stream.
    ///
    /// # Safety
    /// The bound addresses hold what the graph describes and stay allocated until the work has run;
    /// the binding was made by this plan.
    pub unsafe fn run(&self, handle: &Handle, binding: &Binding) -> Result<()> {
        // SAFETY: promised by the caller.
        let status = unsafe { (self.cudnn.table.cudnnBackendExecute)(handle.raw, self.plan.raw(), binding.pack.raw()) };
        self.cudnn.check("cudnnBackendExecute", status)
    }
}

/// Addresses bound to a plan.
pub struct Binding {
    pack: Descriptor,
}
