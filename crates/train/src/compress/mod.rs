//! Models in the number formats of compressed-tensors, from folder to folder: `surogate quantize`. One matrix is in memory at a
//! time; what was written is read back and compared before the folder gets its name.
//!
//! Knows tensors and files; which matrices become codes `chosen.rs` says, in which format `scheme.rs`.

mod chosen;
mod encode;
mod scheme;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use data::Stop;
use data::quantised::Layout;
use data::safetensors::{PlacedWriter, RawTensor, Weights, header_name};
use tensor::compressed::{Codes, Range};
use tensor::{DType, HostTensor};

pub use scheme::CompressRequest;

use self::chosen::{Chosen, Kept, Matrix, choose};
use self::encode::{Encoded, encode, range};
use self::scheme::Scheme;
use crate::card;
use crate::error::{Result, TrainError, go_on};
use crate::hf_config;
use crate::model_folder::{SHARD_BYTES, handed_on, pretty, write_companions};
use crate::prequantised;
use crate::source::ModelSource;
use crate::staged::{Staged, write_synced};
use crate::written::Written;

/// Matrices of one module that engines compute as one, so that they share the scale of scales of NVFP4.
const FUSED: [&[&str]; 3] = [&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"], &["w1", "w3"]];

/// What [`compress`] did.
#[derive(Clone, Debug, PartialEq)]
pub struct Compressed {
    /// Matrices that became codes.
    pub matrices: usize,
    /// Bytes of all weights, before and now.
    pub bytes: (usize, usize),
    /// Elements of a row that share a scale; 0 where it is not groups of a row that do.
    pub group_size: usize,
    /// What should be known of it.
    pub notes: Vec<String>,
}

/// Takes in the bytes of weights that were read so far, and all.
pub type Progress<'a> = &'a dyn Fn(usize, usize);

/// Writes a model with its matrices in a number format of compressed-tensors. The folder appears whole; asked to stop, there is
/// nothing. What a killed process left is removed first. `name`: the model as the user calls it.
///
/// Errors: options that the scheme does not have, a scheme that needs measured activations, a model without a matrix that fits,
/// numbers that are not finite, and anything that stands at `output` already.
pub fn compress(
    source: &ModelSource,
    name: &str,
    request: &CompressRequest,
    output: &Path,
    progress: Progress<'_>,
    stop: Stop<'_>,
) -> Result<Compressed> {
    request.name()?;
    let folder = &source.folder;
    handed_on(folder)?;
    let mut written = Written::by("quantize");
    written.check(output)?;
    let own = source.own(folder)?;
    let mut chosen = choose(source, &own)?;
    let fixed = |of: &Matrix| (of.module.clone(), of.shape[1]);
    let widths: Vec<(String, usize)> = chosen.matrices.iter().map(fixed).collect();
    let widths: Vec<(&str, usize)> = widths.iter().map(|(name, width)| (name.as_str(), *width)).collect();
    let scheme = request.scheme(&widths)?;
    if scheme.measures_activations() {
        let text = format!(
            "--scheme {}: it stores scales of activations, which are measured on data, and that is not built\n  hint: {}",
            request.scheme,
            match scheme.form.codes {
                Codes::Nvfp4 => "nvfp4a16 has the same weights",
                _ => "fp8-dynamic has the same size and measures activations while it serves",
            }
        );
        return Err(TrainError::Usage(text));
    }
    let mut notes = leave_out(&mut chosen, &scheme);
    if chosen.matrices.is_empty() {
        let text = format!("{}: no matrix of its layers can be stored as {}", folder.display(), request.scheme);
        let notes: String = notes.iter().map(|note| format!("\n  {note}")).collect();
        return Err(TrainError::Usage(format!("{text}{notes}")));
    }
    let saved = source.dtype().unwrap_or(DType::BF16);
    let plan = Plan { own: &own, scheme, saved, chosen: &chosen };
    let groups = plan.groups()?;
    let dtype = plan.dtype()?;
    let transposed = chosen.matrices.iter().any(|of| of.transposed);
    if transposed {
        notes.push(
            "the model's matrices are stored as their transposes, which only Surogate reads: other engines have no such layer"
                .to_owned(),
        );
    }
    if scheme.is_of_bf16() && dtype != saved {
        notes.push(format!(
            "all weights were rounded to bfloat16: {} has no values of {saved} for readers",
            request.scheme
        ));
    }
    Staged::clear_abandoned(&written.owner, output)?;
    let staged = Staged::begin(&written, output)?;
    let mut writer = PlacedWriter::new(staged.path(), groups, SHARD_BYTES);
    let bytes = (own.names().iter().filter_map(|name| own.get(name).ok()).map(|of| of.length()).sum(), writer.total());
    let mut digests = Digests { progress, done: 0, all: bytes.0, of: BTreeMap::new() };
    plan.write_kept(&mut writer, &mut digests, stop)?;
    plan.write_matrices(&mut writer, &mut digests, stop)?;
    writer.finish().map_err(|e| TrainError::Failed(e.to_string()))?;
    let ignored: Vec<String> = chosen.ignored.iter().cloned().collect();
    let mut config = source.config.with_dtype(dtype).0;
    config["quantization_config"] = scheme.config(&ignored, transposed);
    write_synced(&staged.path().join(hf_config::FILE), pretty(&config).as_bytes())?;
    write_companions(folder, None, staged.path())?;
    verify(staged.path(), &digests, stop)?;
    let group_size = match scheme.form.extent {
        tensor::compressed::Extent::Group(size) => size,
        _ => 0,
    };
    let done = Compressed { matrices: chosen.matrices.len(), bytes, group_size, notes };
    card::write_compressed(folder, name, &request.scheme, &done, staged.path())?;
    staged.commit(&mut written)?;
    Ok(done)
}

/// Leaves matrices as they are that do not fit the format, and says which.
fn leave_out(chosen: &mut Chosen, scheme: &Scheme) -> Vec<String> {
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let matrices = std::mem::take(&mut chosen.matrices);
    for of in matrices {
        match scheme.refuses(of.shape) {
            None => chosen.matrices.push(of),
            Some(why) => {
                let shape = if of.transposed { [of.shape[1], of.shape[0]] } else { of.shape };
                reasons.entry(why).or_default().push(of.module.clone());
                chosen.ignored.insert(of.module.clone());
                let name = format!("{}.weight", of.module);
                chosen.kept.push(Kept { tensor: of.parameter, name, shape: shape.to_vec() });
            }
        }
    }
    if !chosen.stacked.is_empty() {
        let why = "matrices of experts that files keep as one tensor".to_owned();
        reasons.insert(why, chosen.stacked.clone());
    }
    let line = |(why, names): (String, Vec<String>)| {
        let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
        format!("left as they are: `{}`{more} ({why})", names[0])
    };
    reasons.into_iter().map(line).collect()
}

/// What was written, to be compared with what is read.
struct Digests<'a> {
    progress: Progress<'a>,
    done: usize,
    all: usize,
    /// Of the values of each tensor as readers have them.
    of: BTreeMap<String, blake3::Hash>,
}

impl Digests<'_> {
    fn add(&mut self, name: String, values: &[u8], read: usize) {
        self.of.insert(name, blake3::hash(values));
        self.done += read;
        (self.progress)(self.done, self.all);
    }
}

/// The tensors of a result.
struct Plan<'a> {
    own: &'a Weights,
    scheme: Scheme,
    /// The type of what the model's files have in codes.
    saved: DType,
    chosen: &'a Chosen,
}

impl Plan<'_> {
    /// The type of a tensor in the result.
    fn dtype_of(&self, tensor: &str) -> Result<DType> {
        let view = self.own.get(tensor).map_err(TrainError::model_file)?;
        Ok(match view.dtype {
            _ if view.is_dequantised() => self.scheme.dtype(self.saved),
            dtype @ (DType::F32 | DType::F16) if dtype == self.saved => self.scheme.dtype(dtype),
            // Tables of another type than the model, such as biases of routers, keep theirs.
            dtype => dtype,
        })
    }

    /// The type of the scales of a matrix, which its numbers are rounded to first.
    fn dtype_of_matrix(&self, of: &Matrix) -> Result<DType> {
        Ok(self.scheme.dtype(self.dtype_of(&of.parameter)?))
    }

    /// The type that most of the model is in.
    fn dtype(&self) -> Result<DType> {
        let first = self.chosen.matrices.first().expect("there is a matrix");
        self.dtype_of_matrix(first)
    }

    fn layout(&self, of: &Matrix) -> Result<Layout> {
        Ok(Layout { form: self.scheme.form, packed: self.scheme.packed, dtype: self.dtype_of_matrix(of)? })
    }

    /// The tensors of the files; those of a matrix stand together.
    fn groups(&self) -> Result<Vec<Vec<RawTensor>>> {
        let mut groups = Vec::new();
        for of in &self.chosen.kept {
            let dtype = self.dtype_of(&of.tensor)?;
            let bytes = of.shape.iter().product::<usize>() * dtype.size();
            let (name, shape) = (of.name.clone(), of.shape.clone());
            groups.push(vec![RawTensor { name, dtype: header_name(dtype), shape, bytes }]);
        }
        for of in &self.chosen.matrices {
            groups.push(self.layout(of)?.tensors(&of.module, of.shape));
        }
        groups.sort_by(|a, b| a[0].name.cmp(&b[0].name));
        Ok(groups)
    }

    fn write_kept(&self, writer: &mut PlacedWriter, digests: &mut Digests<'_>, stop: Stop<'_>) -> Result<()> {
        for of in &self.chosen.kept {
            go_on(stop)?;
            let tensor = self.read(&of.tensor)?;
            let read = tensor.bytes.len();
            let tensor = tensor.cast(self.dtype_of(&of.tensor)?);
            writer.put(&of.name, &tensor.bytes).map_err(|e| TrainError::Failed(e.to_string()))?;
            digests.add(of.name.clone(), &tensor.bytes, read);
        }
        Ok(())
    }

    fn write_matrices(&self, writer: &mut PlacedWriter, digests: &mut Digests<'_>, stop: Stop<'_>) -> Result<()> {
        let mut ranges: BTreeMap<&str, Range> = BTreeMap::new();
        for of in &self.chosen.matrices {
            go_on(stop)?;
            let layout = self.layout(of)?;
            let (x, read) = self.numbers(of, layout.dtype)?;
            let own = range(&x);
            if !(own.least.is_finite() && own.most.is_finite()) || x.iter().any(|x| x.is_nan()) {
                let place = x.iter().position(|x| !x.is_finite()).unwrap_or(0);
                let at = [place / of.shape[1], place % of.shape[1]];
                let text = format!(
                    "`{}.weight` is {} at {at:?}, expected finite numbers\n  hint: the model is damaged, or diverged in training",
                    of.module, x[place]
                );
                return Err(TrainError::Usage(text));
            }
            let whole = match layout.form.codes {
                Codes::Nvfp4 => self.range_of_fused(of, own, &mut ranges)?,
                _ => own,
            };
            let Encoded { parts, values } = encode(layout, &x, of.shape, whole);
            for (tensor, bytes) in layout.tensors(&of.module, of.shape).iter().zip(&parts) {
                writer.put(&tensor.name, bytes).map_err(|e| TrainError::Failed(e.to_string()))?;
            }
            let values = if of.transposed { transpose(&values, of.shape[1]) } else { values };
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            digests.add(format!("{}.weight", of.module), &bytes, read);
        }
        Ok(())
    }

    /// The numbers of a matrix, [outputs, inputs], rounded to this type; and the bytes that were read.
    fn numbers(&self, of: &Matrix, dtype: DType) -> Result<(Vec<f32>, usize)> {
        let tensor = self.read(&of.parameter)?;
        let read = tensor.bytes.len();
        let x = tensor.cast(dtype).to_f32();
        Ok((if of.transposed { transpose(&x, of.shape[0]) } else { x }, read))
    }

    fn read(&self, tensor: &str) -> Result<HostTensor> {
        self.own.get(tensor).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)
    }

    /// The range of a matrix and of those that it is computed with.
    fn range_of_fused<'p>(&'p self, of: &'p Matrix, own: Range, known: &mut BTreeMap<&'p str, Range>) -> Result<Range> {
        let (parent, last) = of.module.rsplit_once('.').unwrap_or(("", &of.module));
        let Some(together) = FUSED.into_iter().find(|names| names.contains(&last)) else { return Ok(own) };
        let mut whole = own;
        for other in &self.chosen.matrices {
            let (place, name) = other.module.rsplit_once('.').unwrap_or(("", &other.module));
            if place != parent || !together.contains(&name) || other == of {
                continue;
            }
            let range = match known.get(other.module.as_str()) {
                Some(range) => *range,
                None => range(&self.numbers(other, self.dtype_of_matrix(other)?)?.0),
            };
            known.insert(&other.module, range);
            whole = whole.with(range);
        }
        known.insert(&of.module, own);
        Ok(whole)
    }
}

/// [rows, columns] → [columns, rows].
fn transpose(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// Reads a result as any model is read, and holds every tensor against what was to be written.
fn verify(folder: &Path, digests: &Digests<'_>, stop: Stop<'_>) -> Result<()> {
    let wrong = |what: &str| TrainError::Failed(format!("{}: written and read back, {what}", folder.display()));
    let files = prequantised::weights(folder)?;
    let names: BTreeSet<&str> = files.names().into_iter().collect();
    let expected: BTreeSet<&str> = digests.of.keys().map(String::as_str).collect();
    if let Some(name) = names.symmetric_difference(&expected).next() {
        return Err(wrong(&format!("`{name}` is missing or not expected")));
    }
    for (name, digest) in &digests.of {
        go_on(stop)?;
        let bytes = files.get(name).and_then(|view| view.bytes()).map_err(TrainError::unreadable)?;
        if blake3::hash(&bytes) != *digest {
            return Err(wrong(&format!("`{name}` holds other values")));
        }
    }
    Ok(())
}
