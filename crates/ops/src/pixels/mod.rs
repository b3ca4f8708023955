//! Numbers of patches whose pixels come in 8 bits: a quarter of their bytes or less goes to the device.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::elementwise::element_named;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("pixels.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../cuda/types.cuh")), ("pack.cuh", include_str!("../cuda/pack.cuh"))];

const THREADS: usize = 256;
/// The channels of a pixel: red, green and blue, one byte each.
const CHANNELS: usize = 3;
/// Values of 8 bits.
const LEVELS: usize = 256;

/// Look-up of the number of each pixel of 8 bits, by channel.
pub struct Pixels;

/// The order of a patch's numbers.
#[derive(Clone, Copy)]
struct Order {
    frames: usize,
    channel_last: bool,
}

impl Order {
    fn of(attrs: &Attrs) -> Result<Order, String> {
        let frames = attrs.optional_int("frames")?.unwrap_or(1);
        let channel_last = attrs.flag("channel_last")?;
        match usize::try_from(frames) {
            Ok(1) => Ok(Order { frames: 1, channel_last }),
            Ok(frames) if frames > 1 && !channel_last => Ok(Order { frames, channel_last }),
            _ => Err(format!("`frames` is {frames}, expected a number from 1, and 1 with `channel_last`")),
        }
    }

    /// Returns the pixel and the channel of a number of a patch.
    fn place(self, number: usize, pixels: usize) -> (usize, usize) {
        match self.channel_last {
            true => (number / CHANNELS, number % CHANNELS),
            false => (number % pixels, number / (self.frames * pixels)),
        }
    }
}

fn order(attrs: &Attrs) -> Order {
    Order::of(attrs).expect("checked by the shape rule")
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [x, values] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let (order, bytes, values, x) = (order(call.attrs), x.columns(), values.real(), x.byte());
    let [y] = call.outputs_mut();
    let columns = bytes * order.frames;
    y.real().par_chunks_mut(columns).zip(x.par_chunks(bytes)).for_each(|(y, x)| {
        for (number, y) in y.iter_mut().enumerate() {
            let (pixel, channel) = order.place(number, bytes / CHANNELS);
            *y = values[channel * LEVELS + usize::from(x[CHANNELS * pixel + channel])];
        }
    });
}

impl Op for Pixels {
    fn id(&self) -> OpId {
        id::PIXELS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Numbers of pixels of 8 bits: values[c, x[…, p, c]], ordered by channel, frame and pixel, or with `channel_last` by \
         pixel and channel. All frames are the same. x u8 […, 3·pixels], the channels of a pixel side by side, values f32 \
         [3, 256] → dtype […, 3·frames·pixels]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "dtype", kind: "string", doc: "the type of y, as that of `cast`" },
            Attribute { name: "frames", kind: "int?", doc: "frames of a patch, 1 if it is not given" },
            Attribute { name: "channel_last", kind: "bool?", doc: "true if the channels of a pixel stay side by side" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, values] = inputs else { return Err("takes patches and the numbers of values".into()) };
        let [rows @ .., Dim::Fixed(bytes)] = x.shape.as_slice() else {
            return Err("the patches must be […, bytes], bytes known".into());
        };
        if x.dtype != Element::Fixed(DType::U8) || *bytes == 0 || bytes % CHANNELS != 0 {
            return Err(format!("the patches must be u8 […, 3·pixels], not {x}"));
        }
        if *values != ValueType::new(Element::F32, [CHANNELS.into(), LEVELS.into()]) {
            return Err(format!("the numbers must be f32 [3, 256], not {values}"));
        }
        let columns = Dim::Fixed(bytes * Order::of(attrs)?.frames);
        let shape: Vec<Dim> = rows.iter().cloned().chain([columns]).collect();
        Ok(vec![ValueType::new(element_named(attrs.text("dtype")?)?, shape)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("pixels are not trained")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, values, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        assert!(x.is_dense() && values.is_dense(), "pixels come as a batch has them: {x}, {values}");
        let (order, columns) = (order(call.attrs), y.shape[y.shape.len() - 1]);
        let width = row_width(&[y]);
        let mut defines: Vec<(String, String)> = [
            ("ROWS", y.len() / columns),
            ("COLUMNS", columns),
            ("PIXELS", columns / order.frames / CHANNELS),
            ("FRAMES", order.frames),
            ("CHANNEL_LAST", usize::from(order.channel_last)),
            ("WIDTH", width),
            ("THREADS", THREADS),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_string()))
        .into();
        defines.extend(defines_for("Y", y));
        Lowered::Kernels(vec![KernelSpec {
            entry: "pixels",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [y.len().div_ceil(THREADS * width) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize], attrs: Attrs| {
            let count: usize = shape.iter().product();
            // Steps of an odd number: every value is there once the bytes are enough.
            let values = (0..count).map(|at| (at * 77 % LEVELS) as u8).collect();
            let inputs = vec![
                ExampleInput::Bytes { shape: shape.to_vec(), values },
                ExampleInput::NormalF32 { shape: vec![CHANNELS, LEVELS], scale: 1.0 },
            ];
            Example::new(inputs, attrs)
        };
        let float = || Attrs::new().with("dtype", "float");
        vec![
            example(&[1, 8, 48], float().with("frames", 2)),
            example(&[1, 3, 768], float()),
            example(&[1, 5, 27], float().with("channel_last", true)),
            example(&[1, 4, 75], Attrs::new().with("dtype", "f32").with("frames", 3)),
            example(&[1, 4, 48], Attrs::new().with("dtype", "f32").with("channel_last", true)),
        ]
    }
}
