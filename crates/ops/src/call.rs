//! One call of a CPU reference, with dense operands whatever the storage types and strides are. The backend widens
//! inputs to `T` and rounds outputs to their storage type.

use tensor::{Attrs, DType};

/// The elements of an operand.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a, T> {
    Real(&'a [T]),
    Int(&'a [i32]),
    Byte(&'a [u8]),
}

/// A read-only operand, row-major without gaps.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T> {
    pub shape: &'a [usize],
    pub data: Data<'a, T>,
}

impl<'a, T> Input<'a, T> {
    /// Panics when the operand is not floating point: the shape rule admits nothing else.
    pub fn real(&self) -> &'a [T] {
        match self.data {
            Data::Real(x) => x,
            _ => panic!("a floating-point operand was promised by the shape rule"),
        }
    }

    pub fn int(&self) -> &'a [i32] {
        match self.data {
            Data::Int(x) => x,
            _ => panic!("an integer operand was promised by the shape rule"),
        }
    }

    pub fn byte(&self) -> &'a [u8] {
        match self.data {
            Data::Byte(x) => x,
            _ => panic!("a byte operand was promised by the shape rule"),
        }
    }

    /// Extent of the last axis; 1 for a scalar.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows when all axes but the last are folded.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }
}

/// A written operand. It starts with the present contents of the memory, so that an update can
/// read it; every element must be written otherwise.
#[derive(Debug)]
pub enum Output<'a, T> {
    Real { shape: &'a [usize], data: &'a mut [T], storage: DType },
    Int { shape: &'a [usize], data: &'a mut [i32] },
    Byte { shape: &'a [usize], data: &'a mut [u8] },
}

impl<'a, T> Output<'a, T> {
    pub fn real(&mut self) -> &mut [T] {
        match self {
            Output::Real { data, .. } => data,
            _ => panic!("a floating-point result was promised by the shape rule"),
        }
    }

    pub fn int(&mut self) -> &mut [i32] {
        match self {
            Output::Int { data, .. } => data,
            _ => panic!("an integer result was promised by the shape rule"),
        }
    }

    pub fn byte(&mut self) -> &mut [u8] {
        match self {
            Output::Byte { data, .. } => data,
            _ => panic!("a byte result was promised by the shape rule"),
        }
    }

    /// Returns the same operand for a shorter time, for a call inside a call to write to.
    pub fn lend(&mut self) -> Output<'_, T> {
        match self {
            Output::Real { shape, data, storage } => Output::Real { shape, data, storage: *storage },
            Output::Int { shape, data } => Output::Int { shape, data },
            Output::Byte { shape, data } => Output::Byte { shape, data },
        }
    }

    pub fn shape(&self) -> &'a [usize] {
        match self {
            Output::Real { shape, .. } | Output::Int { shape, .. } | Output::Byte { shape, .. } => shape,
        }
    }

    /// The type that the backend will round to; f64 in the gradient check.
    pub fn storage(&self) -> DType {
        match self {
            Output::Real { storage, .. } => *storage,
            Output::Int { .. } => DType::I32,
            Output::Byte { .. } => DType::U8,
        }
    }
}

/// The attributes, inputs and outputs that a reference sees.
pub struct Call<'a, T> {
    pub attrs: &'a Attrs,
    pub inputs: &'a [Input<'a, T>],
    pub outputs: &'a mut [Output<'a, T>],
}

impl<'a, T> Call<'a, T> {
    /// The outputs as an array, for pattern binding.
    pub fn outputs_mut<const N: usize>(&mut self) -> &mut [Output<'a, T>; N] {
        (&mut *self.outputs).try_into().unwrap_or_else(|_| panic!("{N} results were promised by the shape rule"))
    }
}
