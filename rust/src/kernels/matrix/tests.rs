//! Every kind of matrix against float64.

use std::sync::Arc;

use half::f16;
use proptest::prelude::*;

use super::*;
use crate::kernels::{GROUP_SIZE, Huge, KBlock, Values};

impl Values for Vec<bf16> {
    fn values(&self) -> &[bf16] {
        self
    }
}

fn q_of(row: usize, column: usize) -> i32 {
    ((row * 7 + column * 5 + row * column) % 16) as i32 - 8
}

fn word_of(row: usize, eight: usize) -> u32 {
    (0..8).map(|i| ((q_of(row, 8 * eight + i) + 8) as u32) << (4 * i)).sum()
}

fn factor_of(row: usize, group: usize) -> bf16 {
    bf16::from_f32(0.01 + ((row * 3 + group * 11) % 17) as f32 * 0.004)
}

/// A matrix from blocks of `Q4_0`, whose factors no bfloat16 has, and its weights.
fn q4_0([rows, columns]: [usize; 2], kernels: &Kernels) -> (Matrix, Vec<f64>) {
    let factor = |row: usize, group: usize| {
        f16::from_bits(0x1001 + ((row * 31 + group * 57) % 0x1fff) as u16)
    };
    let nibble = |row, column| (q_of(row, column) + 8) as u8;
    let mut blocks = Vec::new();
    for row in 0..rows {
        for group in 0..columns / GROUP_SIZE {
            blocks.extend(factor(row, group).to_le_bytes());
            let at = group * GROUP_SIZE;
            blocks.extend((at..at + 16).map(|i| nibble(row, i) | nibble(row, i + 16) << 4));
        }
    }
    let matrix = W4Matrix::of_q4_0([rows, columns], &blocks, kernels).unwrap().unwrap();
    let weight = |i: usize| {
        let (row, column) = (i / columns, i % columns);
        f64::from(q_of(row, column)) * factor(row, column / GROUP_SIZE).to_f64()
    };
    (Matrix::W4(matrix), (0..rows * columns).map(weight).collect())
}

/// A matrix of eight-bit integers, and its weights.
fn eight_bits([rows, columns]: [usize; 2], kernels: &Kernels) -> (Matrix, Vec<f64>) {
    let factor = |group: usize| f16::from_bits(0x1001 + (group * 57 % 0x1fff) as u16);
    let integer = |index: usize| ((index * 73 + index / 7) % 256) as u8;
    let group =
        |index: usize| (factor(index), std::array::from_fn(|i| integer(index * GROUP_SIZE + i)));
    let matrix = W8Matrix::of_halves([rows, columns], &group, kernels).unwrap().unwrap();
    let weight = |i: usize| (f64::from(integer(i)) - 128.0) * factor(i / GROUP_SIZE).to_f64();
    (Matrix::W8(matrix), (0..rows * columns).map(weight).collect())
}

/// A block of a K type with integers below `below`.
fn k_block(index: usize, below: usize) -> KBlock {
    let small = |i: usize| ((index * 31 + i * 17 + i * i) % 64) as u8;
    KBlock {
        d: f16::from_bits(0x1001 + (index * 57 % 0x1fff) as u16),
        dmin: f16::from_bits(0x0801 + (index * 91 % 0x1fff) as u16),
        scales: std::array::from_fn(|i| if below == 64 { small(i) + 150 } else { small(i) }),
        integers: std::array::from_fn(|i| ((i * 73 + i / 7 + index) % below) as u8),
    }
}

/// The weights of such blocks.
fn k_weights(count: usize, below: usize) -> Vec<f64> {
    (0..count)
        .map(|i| {
            let (block, column) = (k_block(i / 256, below), i % 256);
            let q = f64::from(block.integers[column]);
            if below == 64 {
                let scale = block.scales[column / 16].cast_signed();
                return block.d.to_f64() * f64::from(scale) * (q - 32.0);
            }
            let [scale, minimum] = [0, 8].map(|i| f64::from(block.scales[column / 32 + i]));
            block.d.to_f64() * scale * q - block.dmin.to_f64() * minimum
        })
        .collect()
}

/// Matrices of each K type, and their weights.
fn k_types(shape: [usize; 2], kernels: &Kernels) -> Vec<(Matrix, Vec<f64>)> {
    let count = shape[0] * shape[1];
    let (four, five, six) = (
        Q4KMatrix::of_blocks(shape, &|i| k_block(i, 16), kernels).unwrap().unwrap(),
        Q5KMatrix::of_blocks(shape, &|i| k_block(i, 32), kernels).unwrap().unwrap(),
        Q6KMatrix::of_blocks(shape, &|i| k_block(i, 64), kernels).unwrap().unwrap(),
    );
    vec![
        (Matrix::Q4K(four), k_weights(count, 16)),
        (Matrix::Q5K(five), k_weights(count, 32)),
        (Matrix::Q6K(six), k_weights(count, 64)),
    ]
}

/// A matrix of each kind, and its weights in float64.
fn matrices([rows, columns]: [usize; 2]) -> Vec<(Matrix, Vec<f64>)> {
    let values: Vec<_> =
        (0..rows * columns).map(|i| bf16::from_f32(((i * 29) % 97) as f32 / 40.0 - 1.2)).collect();
    let wide = values.iter().map(|value| value.to_f64()).collect();
    let dense = Bf16Matrix::new([rows, columns], Arc::new(values)).unwrap();
    let mut all = vec![(Matrix::Bf16(dense), wide)];
    if W4Matrix::fits(columns) {
        let words: Vec<u8> = (0..rows * columns / 8)
            .flat_map(|i| word_of(i / (columns / 8), i % (columns / 8)).to_le_bytes())
            .collect();
        let groups = columns / GROUP_SIZE;
        let factors: Vec<_> =
            (0..rows * groups).map(|i| factor_of(i / groups, i % groups).to_bits()).collect();
        let kernels = Kernels::new(2, None).unwrap();
        let packed = (&*factors, false);
        let packed = W4Matrix::of_words([rows, columns], &words, packed, &kernels).unwrap();
        let weight = |i: usize| {
            let (row, column) = (i / columns, i % columns);
            f64::from(q_of(row, column)) * factor_of(row, column / 32).to_f64()
        };
        all.push((Matrix::W4(packed), (0..rows * columns).map(weight).collect()));
        all.push(q4_0([rows, columns], &kernels));
        all.push(eight_bits([rows, columns], &kernels));
    }
    if Q6KMatrix::fits(columns) {
        all.extend(k_types([rows, columns], &Kernels::new(2, None).unwrap()));
    }
    all
}

fn tokens(count: usize, columns: usize, seed: usize) -> Vec<bf16> {
    (0..count * columns)
        .map(|i| bf16::from_f32(((i * 37 + seed * 13) % 101) as f32 / 50.0 - 1.0))
        .collect()
}

/// Each product in float64, and the sum of its terms' sizes.
fn products(weights: &[f64], x: &[bf16], columns: usize) -> Vec<(f64, f64)> {
    x.chunks(columns)
        .flat_map(|x| {
            weights.chunks(columns).map(move |row| {
                let terms = row.iter().zip(x).map(|(w, x)| w * x.to_f64());
                (terms.clone().sum(), terms.map(f64::abs).sum())
            })
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 40 }) })]
    #[test]
    fn products_of_every_kind_of_matrix_on_every_instruction_set_are_those_of_float64(
        rows in 1..if cfg!(miri) { 20 } else { 70_usize },
        columns in prop_oneof![Just(64), Just(192), Just(512), 1_usize..150],
        count in 1..if cfg!(miri) { 3 } else { 20_usize }, threads in 1_usize..4, seed in 0_usize..1000,
    ) {
        let x = tokens(count, columns, seed);
        for (matrix, weights) in matrices([rows, columns]) {
            let wanted = products(&weights, &x, columns);
            for set in InstructionSet::available() {
                let kernels = Kernels::new(threads, Some(set)).unwrap();
                let mut out = vec![f32::NAN; count * rows];
                multiply(&kernels, &x, &mut [Product::whole(&matrix, &mut out)]).unwrap();
                for (found, (wanted, size)) in out.iter().zip(&wanted) {
                    prop_assert!((f64::from(*found) - wanted).abs() <= size * 2e-6, "{set:?}");
                }
            }
        }
    }
}

#[test]
fn a_form_and_a_shape_tell_the_bytes_that_a_matrix_has() {
    for shape in [[1, 256], [33, 64], [16, 96], [100, 512]] {
        for (matrix, _) in matrices(shape) {
            let form = matrix.form();
            assert_eq!(form.or_bf16(shape[1]), form);
            assert_eq!(form.bytes(shape), matrix.bytes(), "{form:?} {shape:?}");
        }
    }
    assert_eq!(MatrixForm::W4.or_bf16(96), MatrixForm::Bf16);
    assert_eq!(MatrixForm::Q6K.or_bf16(128), MatrixForm::Bf16);
}

#[test]
fn a_token_gets_the_same_bits_alone_and_among_others_with_any_number_of_threads() {
    let (rows, count) = if cfg!(miri) { (20, 3) } else { (100, 19) };
    for (matrix, _) in matrices([rows, 256]) {
        let x = tokens(count, 256, 1);
        for set in InstructionSet::available() {
            let run = |x: &[bf16], threads| {
                let kernels = Kernels::new(threads, Some(set)).unwrap();
                let mut out = vec![0.0; x.len() / 256 * rows];
                multiply(&kernels, x, &mut [Product::whole(&matrix, &mut out)]).unwrap();
                out
            };
            let together = run(&x, 3);
            for (token, x) in x.chunks(256).enumerate() {
                assert_eq!(run(x, 1), together[token * rows..][..rows], "{set:?}");
            }
        }
    }
}

#[test]
fn integer_weights_give_the_same_bits_with_all_instructions_that_multiply_integers() {
    let sets = || InstructionSet::available().into_iter().filter(|set| set.multiplies().is_some());
    for (matrix, _) in matrices([50, 512]) {
        if matches!(matrix, Matrix::Bf16(_)) {
            continue;
        }
        let x = tokens(3, 512, 6);
        let bits: Vec<_> = sets()
            .map(|set| {
                let kernels = Kernels::new(1, Some(set)).unwrap();
                let mut out = vec![f32::NAN; 3 * 50];
                multiply(&kernels, &x, &mut [Product::whole(&matrix, &mut out)]).unwrap();
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            })
            .collect();
        for (set, found) in sets().zip(&bits) {
            assert_eq!(found, &bits[0], "{set:?}");
        }
    }
}

#[test]
fn the_largest_integers_times_the_largest_tokens_are_added_up_without_saturation() {
    let kernels = Kernels::new(1, None).unwrap();
    let eight = |integer: u8| {
        let group = |_| (f16::ONE, [integer; GROUP_SIZE]);
        let matrix = W8Matrix::of_halves([16, 256], &group, &kernels).unwrap().unwrap();
        (Matrix::W8(matrix), f64::from(integer) - 128.0)
    };
    let block = |integer: u8| KBlock {
        d: f16::ONE,
        dmin: f16::ZERO,
        scales: [1; 16],
        integers: [integer; 256],
    };
    let (four, five, six) = (
        Q4KMatrix::of_blocks([16, 256], &|_| block(15), &kernels).unwrap().unwrap(),
        Q5KMatrix::of_blocks([16, 256], &|_| block(31), &kernels).unwrap().unwrap(),
        Q6KMatrix::of_blocks([16, 256], &|_| block(63), &kernels).unwrap().unwrap(),
    );
    let all = [
        eight(0),
        eight(255),
        (Matrix::Q4K(four), 15.0),
        (Matrix::Q5K(five), 31.0),
        (Matrix::Q6K(six), 63.0 - 32.0),
    ];
    // In fixed point the first ones have a low byte of -128.
    for value in [1.984375, -1.984375, 1.9921875, -1.9921875] {
        let x = vec![bf16::from_f64(value); 256];
        for (matrix, weight) in &all {
            for set in InstructionSet::available() {
                let kernels = Kernels::new(1, Some(set)).unwrap();
                let mut out = vec![f32::NAN; 16];
                multiply(&kernels, &x, &mut [Product::whole(matrix, &mut out)]).unwrap();
                let wanted = weight * value * 256.0;
                for found in out {
                    let error = (f64::from(found) - wanted).abs();
                    assert!(error <= wanted.abs() * 1e-6, "{set:?} {found} {wanted}");
                }
            }
        }
    }
}

#[test]
fn some_rows_of_a_product_are_those_of_the_whole() {
    let x = tokens(3, 64, 4);
    for set in InstructionSet::available() {
        let kernels = Kernels::new(2, Some(set)).unwrap();
        for (matrix, _) in matrices([70, 64]) {
            let mut whole = vec![0.0; 3 * 70];
            multiply(&kernels, &x, &mut [Product::whole(&matrix, &mut whole)]).unwrap();
            for rows in [0..70, 16..48, 5..7, 30..70, 64..70, 9..9] {
                let mut out = vec![f32::NAN; 3 * rows.len()];
                let product = Product { matrix: &matrix, rows: rows.clone(), out: &mut out };
                multiply(&kernels, &x, &mut [product]).unwrap();
                let wanted: Vec<_> =
                    whole.chunks(70).flat_map(|token| token[rows.clone()].to_vec()).collect();
                assert_eq!(out, wanted, "{set:?} {rows:?}");
            }
            let mut out = vec![0.0; 3 * 10];
            let beyond = Product { matrix: &matrix, rows: 65..75, out: &mut out };
            assert!(multiply(&kernels, &x, &mut [beyond]).is_err());
        }
    }
}

#[test]
fn several_products_are_those_of_each_alone_and_gated_ones_their_gelu() {
    let (rows, count) = if cfg!(miri) { (20, 2) } else { (40, 11) };
    let x = tokens(count, 64, 2);
    for set in InstructionSet::available() {
        let kernels = Kernels::new(3, Some(set)).unwrap();
        for (gate, _) in matrices([rows, 64]) {
            let (up, _) = matrices([rows, 64]).swap_remove(0);
            let alone = |matrix: &Matrix| {
                let mut out = vec![0.0; count * rows];
                multiply(&kernels, &x, &mut [Product::whole(matrix, &mut out)]).unwrap();
                out
            };
            let (mut one, mut two) = (vec![0.0; count * rows], vec![0.0; count * rows]);
            multiply(
                &kernels,
                &x,
                &mut [Product::whole(&gate, &mut one), Product::whole(&up, &mut two)],
            )
            .unwrap();
            assert_eq!((&one, &two), (&alone(&gate), &alone(&up)));
            let (mut wanted, mut found) =
                (vec![bf16::NAN; count * rows], vec![bf16::NAN; count * rows]);
            gelu_times(set, &one, &two, &mut wanted);
            gated(&kernels, &x, (&gate, &up), &mut found).unwrap();
            // Roundings differ where a vector's lanes do not fill it.
            for (found, wanted) in found.iter().zip(wanted) {
                let (found, wanted) = (found.to_f32(), wanted.to_f32());
                assert!((found - wanted).abs() <= wanted.abs() / 128.0, "{found} {wanted}");
            }
        }
    }
}

#[test]
fn the_best_rows_are_those_of_a_sort_without_what_is_not_allowed() {
    let x = tokens(1, 64, 3);
    for set in InstructionSet::available() {
        let kernels = Kernels::new(2, Some(set)).unwrap();
        let rows = if cfg!(miri) { 100 } else { 3000 };
        for (matrix, _) in matrices([rows, 64]) {
            let mut logits = vec![0.0; rows];
            multiply(&kernels, &x, &mut [Product::whole(&matrix, &mut logits)]).unwrap();
            let is_allowed = |row: usize| row % 7 != 3;
            let mut wanted: Vec<_> =
                logits.into_iter().enumerate().filter(|(row, _)| is_allowed(*row)).collect();
            // A stable sort: of equal ones the lowest row first.
            wanted.sort_by(|a, b| b.1.total_cmp(&a.1));
            for count in [1, 5, 64] {
                let found = best(&kernels, &x, &matrix, count, &is_allowed).unwrap();
                assert_eq!(found, wanted[..count]);
            }
            assert_eq!(best(&kernels, &x, &matrix, 3, &|row| row == 2).unwrap().len(), 1);
        }
    }
}

#[test]
fn slices_of_other_lengths_are_refused() {
    let kernels = Kernels::new(1, None).unwrap();
    for (matrix, _) in matrices([16, 64]) {
        let (x, mut out) = (vec![bf16::ONE; 65], vec![0.0; 16]);
        let mut run = |x: &[bf16], width: usize| {
            multiply(&kernels, x, &mut [Product::whole(&matrix, &mut out[..width])]).is_ok()
        };
        assert!(!run(&x, 16) && !run(&x[..64], 15) && !run(&[], 16));
        assert!(run(&x[..64], 16) && run(&[], 0));
        assert!(best(&kernels, &x, &matrix, 1, &|_| true).is_err());
        let mut out = vec![bf16::ZERO; 15];
        assert!(gated(&kernels, &x[..64], (&matrix, &matrix), &mut out).is_err());
    }
    assert!(!W4Matrix::fits(96));
    let short: Arc<dyn Values> = Arc::new(Huge::<bf16>::zeroed(15).unwrap());
    assert!(Bf16Matrix::new([4, 4], short).is_none());
}

#[test]
fn instructions_that_the_machine_lacks_are_refused_by_name() {
    for set in InstructionSet::ALL {
        match Kernels::new(1, Some(set)) {
            Ok(kernels) => assert!(InstructionSet::available().contains(&kernels.set)),
            Err(error) => assert!(error.to_string().contains(set.name()), "{error}"),
        }
    }
}
