//! A compiled model that goes on where its sequences were: lays the tokens of a step out, runs it, and reads what follows them.
//! Several ranks run one step at once, each with rows and pages of its own.

use compiler::SLOT_OF_TOKEN;
use compiler::sampling::Draw;
use data::Batch;
use program::{EntryKind, Variant, generation};
use tensor::{DType, HostTensor};

use super::capacity::{Capacity, variant};
use crate::engine::Engine;
use crate::error::Result;

pub(crate) const LOGITS: &str = "logits";

/// The tokens that follow the rows of a step. Row `i` of rank `r` is at `r · batch + i`; rows of padding are after those that
/// were requested.
pub(super) struct Following {
    /// Rows of a rank, padding included.
    pub batch: usize,
    /// The token that was drawn for each row.
    pub ids: Vec<u32>,
    /// The log-probability of each of them.
    pub logps: Vec<f32>,
    /// Logits of each rank row by row, as they are on the device.
    pub logits: Vec<HostTensor>,
}

/// The parts of [`Following`] that are read from the device besides the tokens.
#[derive(Clone, Copy, Default)]
pub(super) struct Wanted {
    pub logps: bool,
    pub logits: bool,
}

impl Following {
    /// The logits of a row as f32.
    pub fn logits_of(&self, place: usize) -> Vec<f32> {
        let (logits, row) = (&self.logits[place / self.batch], place % self.batch);
        let vocabulary = logits.len() / self.batch;
        let bytes = vocabulary * logits.dtype.size();
        let bytes = &logits.bytes[row * bytes..][..bytes];
        let widened = |x: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16);
        match logits.dtype {
            DType::BF16 => bytes.as_chunks().0.iter().map(widened).collect(),
            dtype => HostTensor { dtype, shape: vec![vocabulary], bytes: bytes.to_vec() }.to_f32(),
        }
    }
}

/// The tokens of one row that are read at once.
pub(super) struct Row<'a> {
    pub ids: &'a [i32],
    /// The place of the first in its sequence.
    pub position: usize,
    pub pages: &'a [u32],
    pub slot: u32,
    /// The slot of its adapter; 0 for none.
    pub adapter: u32,
    /// Time, row and column of each token, where these are not its place in the sequence.
    pub axes: Option<Vec<i32>>,
    /// The tokens as one row with the images among them, laid out.
    pub images: Option<Batch>,
    /// The sampling of the token after the last one.
    pub draw: Draw,
}

/// A compiled model that goes on where its sequences were, whoever has it.
pub(crate) struct Reader<'a> {
    pub engine: &'a mut Engine,
    /// The entries and shapes that it is compiled for.
    pub capacity: &'a Capacity,
}

impl Reader<'_> {
    /// True if results depend on the longest sequence of a batch: then each is alone in its batch.
    pub fn runs_alone(&self) -> bool {
        self.has_input(generation::LARGEST_POSITION)
    }

    /// True if a sequence has state besides its pages, which another one with the same beginning cannot read.
    pub fn has_slots(&self) -> bool {
        self.has_input(generation::SLOTS)
    }

    fn has_input(&self, name: &str) -> bool {
        let mut inputs = self.engine.program().entries.iter().flat_map(|entry| &entry.inputs);
        inputs.any(|(known, _)| known == name)
    }

    /// Reads tokens, which the caches then hold. Returns what follows the last token of each row where that is wanted.
    /// `rows`: those of each rank, or of all where all run the same; `whole`: tokens that the longest sequence has, of which
    /// only some may be read.
    pub(super) fn read(
        &mut self,
        rows: &[Vec<Row<'_>>],
        whole: usize,
        wanted: Option<Wanted>,
    ) -> Result<Option<Following>> {
        let Reader { engine, capacity } = self;
        let images = rows[0].first().and_then(|row| row.images.as_ref());
        let tokens = rows.iter().flatten().map(|row| row.ids.len()).max().unwrap_or(1);
        let most = rows.iter().map(Vec::len).max().unwrap_or(1);
        let shape = match images {
            Some(of) => of_images(of),
            None if tokens > 1 => variant(1, capacity.chunk(tokens)),
            None => variant(capacity.batch(most), 1),
        };
        if images.is_some() && !capacity.images.contains(&shape) {
            // What was compiled for text stays: the sequences that run need it.
            engine.prepare_all(&capacity.variants().into_iter().chain([shape]).collect::<Vec<_>>())?;
        }
        let entry = engine.program().entry(EntryKind::Forward, Some(shape));
        let entry = entry.expect("the shapes of a capacity are compiled together");
        let count = rows.len();
        for (rank, rows) in rows.iter().enumerate() {
            let inputs = Inputs::new(rows, shape, capacity.cache.pages_per_sequence, whole);
            inputs.write(engine, entry, (count > 1).then_some(rank), images)?;
        }
        engine.session().run(entry)?;
        let Some(wanted) = wanted else { return Ok(None) };
        let mut following = Following { batch: shape.batch, ids: Vec::new(), logps: Vec::new(), logits: Vec::new() };
        for rank in 0..rows.len() {
            let mut result = |name: &str| match count {
                1 => engine.output_as_stored(EntryKind::Forward, shape, name),
                _ => engine.output_of_rank(rank, entry, name),
            };
            let words = |of: &HostTensor| -> Vec<u32> {
                of.bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
            };
            following.ids.extend(words(&result(generation::NEXT_TOKEN)?));
            if wanted.logps {
                following.logps.extend(words(&result(generation::NEXT_LOGP)?).into_iter().map(f32::from_bits));
            }
            if wanted.logits {
                following.logits.push(result(LOGITS)?);
            }
        }
        Ok(Some(following))
    }
}

/// The shape of a row with images.
pub(super) fn of_images(of: &Batch) -> Variant {
    Variant { patches: of.patches.count(), ..variant(1, of.seq_len) }
}

/// Inputs that rows with images bring themselves, though rows of text have them too.
const OF_IMAGES: [&str; 2] = ["input_ids", "text_ids"];

/// The numbers of a step's rows on one rank, as the entry reads them.
struct Inputs {
    ids: Vec<i32>,
    positions: Vec<i32>,
    in_cache: Vec<i32>,
    last_keys: Vec<i32>,
    adapters: Vec<i32>,
    axes: Vec<i32>,
    table: Vec<i32>,
    slots: Vec<i32>,
    last: Vec<i32>,
    largest: Vec<i32>,
    /// Bits of f32.
    sampling: Vec<i32>,
    factors: Vec<i32>,
}

impl Inputs {
    /// `width`: pages of a sequence.
    fn new(rows: &[Row<'_>], shape: Variant, width: usize, whole: usize) -> Inputs {
        let (tokens, size) = (shape.seq_len, shape.batch * shape.seq_len);
        let likeliest = Draw { temperature: 0.0, ..Draw::ALL };
        let draws = (0..shape.batch).map(|row| rows.get(row).map_or(likeliest, |row| row.draw));
        let mut of = Inputs {
            ids: vec![0; size],
            positions: vec![0; size],
            in_cache: vec![-1; size],
            last_keys: vec![-1; size],
            adapters: vec![0; size],
            axes: vec![0; 3 * size],
            table: vec![0; shape.batch * width],
            slots: vec![0; shape.batch],
            last: vec![0; shape.batch],
            largest: Vec::new(),
            sampling: draws.clone().flat_map(|draw| draw.to_row()).map(|number| number.to_bits() as i32).collect(),
            factors: draws.map(|draw| draw.logit_factor().to_bits() as i32).collect(),
        };
        let mut largest = whole.saturating_sub(1);
        for (index, row) in rows.iter().enumerate() {
            for (t, id) in row.ids.iter().enumerate() {
                let (at, position) = (index * tokens + t, row.position + t);
                (of.ids[at], of.positions[at], of.in_cache[at]) = (*id, position as i32, position as i32);
                largest = largest.max(position);
                let last = row.images.as_ref().map_or(t, |batch| batch.patches.last_key[t] as usize);
                (of.last_keys[at], of.adapters[at]) = ((row.position + last) as i32, row.adapter as i32);
                let own =
                    row.axes.as_ref().map_or([position as i32; 3], |of| [of[3 * t], of[3 * t + 1], of[3 * t + 2]]);
                of.axes[3 * at..][..3].copy_from_slice(&own);
            }
            (of.last[index], of.slots[index]) = (row.ids.len() as i32 - 1, row.slot as i32);
            for (page, own) in of.table[index * width..].iter_mut().zip(row.pages) {
                *page = *own as i32;
            }
        }
        of.largest.push(largest as i32);
        of
    }

    fn of(&self, name: &str) -> Option<&[i32]> {
        Some(match name {
            "input_ids" | "text_ids" => &self.ids,
            "position_ids" => &self.positions,
            "token_axes" => &self.axes,
            generation::LAST_KEYS => &self.last_keys,
            SLOT_OF_TOKEN => &self.adapters,
            generation::POSITIONS => &self.in_cache,
            generation::TABLE => &self.table,
            generation::SLOTS => &self.slots,
            generation::LAST_TOKEN => &self.last,
            generation::LARGEST_POSITION => &self.largest,
            generation::SAMPLING => &self.sampling,
            generation::LOGIT_FACTORS => &self.factors,
            _ => return None,
        })
    }

    /// Writes them to where the entry reads them, on a rank or on all. What it does not read is left out.
    fn write(&self, engine: &mut Engine, entry: usize, rank: Option<usize>, images: Option<&Batch>) -> Result<()> {
        let program = engine.program().clone();
        for (name, at) in &program.entries[entry].inputs {
            let of_images = images.filter(|_| OF_IMAGES.contains(&name.as_str()) || self.of(name).is_none());
            let bytes = match (of_images, self.of(name)) {
                (Some(batch), _) => data::inputs::input(name).and_then(|input| input.bytes(batch)),
                (None, Some(numbers)) => Some(numbers.iter().flat_map(|number| number.to_le_bytes()).collect()),
                (None, None) if name == "text" => Some(1f32.to_le_bytes().repeat(at.len()).into()),
                (None, None) => None,
            };
            match (bytes, rank) {
                (Some(bytes), Some(rank)) => engine.session().write_rank(rank, at, &bytes)?,
                (Some(bytes), None) => engine.session().write(at, &bytes)?,
                (None, _) => {}
            }
        }
        Ok(())
    }
}
