//! The size that each processor gives an image.

/// Bounds of the area of an image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Area {
    pub least: u64,
    pub most: u64,
}

/// `smart_resize` of Qwen2-VL: both sides multiples of `factor`, the area within bounds, the aspect kept.
pub(super) fn smart([h, w]: [usize; 2], factor: usize, area: Area) -> Result<[usize; 2], String> {
    let ratio = h.max(w) as f64 / h.min(w) as f64;
    if ratio > 200.0 {
        return Err(format!("has {h} × {w} pixels, sides in a ratio of {ratio:.0}, expected at most 200"));
    }
    let f = factor as f64;
    let sides = [h as f64, w as f64];
    let mut target = sides.map(|side| (side / f).round_ties_even() * f);
    let found = target[0] * target[1];
    if found > area.most as f64 {
        let beta = (sides[0] * sides[1] / area.most as f64).sqrt();
        target = sides.map(|side| f64::max(f, (side / beta / f).floor() * f));
    } else if found < area.least as f64 {
        let beta = (area.least as f64 / (sides[0] * sides[1])).sqrt();
        target = sides.map(|side| (side * beta / f).ceil() * f);
    }
    Ok(target.map(|side| side as usize))
}

/// Gemma 4: as large as `tokens` allow, both sides multiples of `side`, the aspect kept.
pub(super) fn filled([h, w]: [usize; 2], side: usize, tokens: usize) -> [usize; 2] {
    let (height, width, s) = (h as f64, w as f64, side as f64);
    let k = (tokens as f64 * s * s / (height * width)).sqrt();
    let target = [(k * height / s).floor() as usize * side, (k * width / s).floor() as usize * side];
    let long = |long: usize, short: usize| (long / short).min(tokens) * side;
    match target {
        [0, _] => [side, long(w, h)],
        [_, 0] => [long(h, w), side],
        target => target,
    }
}

/// Pixtral: no longer than `longest`, then up to multiples of the patch. Never enlarged otherwise.
pub(super) fn bounded([h, w]: [usize; 2], longest: usize, patch: [usize; 2]) -> [usize; 2] {
    let ratio = h.max(w) as f64 / longest as f64;
    let shrunk = |side: usize| if ratio > 1.0 { ((side as f64 / ratio).floor() as usize).max(1) } else { side };
    [shrunk(h).div_ceil(patch[0]) * patch[0], shrunk(w).div_ceil(patch[1]) * patch[1]]
}

/// Idefics3: the longer side becomes `longest`, the other an even number.
pub(super) fn to_longest([h, w]: [usize; 2], longest: usize) -> [usize; 2] {
    let aspect = w as f64 / h as f64;
    let even = |side: f64| {
        let side = side as usize;
        (side + side % 2).max(1)
    };
    let target =
        if w >= h { [even(longest as f64 / aspect), longest] } else { [longest, even(longest as f64 * aspect)] };
    target.map(|side| side.min(4096))
}

/// Idefics3: both sides up to multiples of the tile, the longer first.
pub(super) fn to_tiles([h, w]: [usize; 2], tile: usize) -> [usize; 2] {
    let aspect = w as f64 / h as f64;
    let up = |side: usize| side.div_ceil(tile) * tile;
    if w >= h {
        let width = up(w);
        [up((width as f64 / aspect) as usize), width]
    } else {
        let height = up(h);
        [height, up((height as f64 * aspect) as usize)]
    }
}

/// Pan and scan of Gemma 3: the crops along the longer side as (top, left, height, width); none where it does not pay.
pub(super) fn crops([h, w]: [usize; 2], ratio: f64, least: usize, most: usize) -> Vec<[usize; 4]> {
    let (long, short) = (h.max(w), h.min(w));
    if (long as f64 / short as f64) < ratio {
        return Vec::new();
    }
    let wanted = (long as f64 / short as f64 + 0.5).floor() as usize;
    let count = wanted.min(long / least.max(1)).max(2).min(most);
    let size = long.div_ceil(count.max(1));
    if size.min(short) < least {
        return Vec::new();
    }
    let of = |number: usize| {
        let (first, end) = (number * size, ((number + 1) * size).min(long));
        if w >= h { [0, first, h, end - first] } else { [first, 0, end - first, w] }
    };
    (0..count).map(of).filter(|[_, _, height, width]| *height > 0 && *width > 0).collect()
}
