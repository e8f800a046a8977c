//! The reader against files of a small writer, whole, cut short and with bytes changed.

use std::path::Path;

use proptest::prelude::*;

use super::*;

/// A GGUF file in the making.
#[derive(Default)]
pub(super) struct Writer {
    keys: u64,
    metadata: Vec<u8>,
    count: u64,
    tensors: Vec<u8>,
    data: Vec<u8>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Writer {
    pub(super) fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys += 1;
        self.metadata.extend([&*text(key), &kind.to_le_bytes(), value].concat());
        self
    }

    pub(super) fn number(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub(super) fn float(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub(super) fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &text(value))
    }

    pub(super) fn list(self, key: &str, kind: u32, items: &[Vec<u8>]) -> Self {
        let head = [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()].concat();
        self.raw(key, 9, &[head, items.concat()].concat())
    }

    pub(super) fn texts(self, key: &str, items: &[&str]) -> Self {
        let items: Vec<_> = items.iter().map(|item| text(item)).collect();
        self.list(key, 8, &items)
    }

    /// `shape` rows first; the data follows what is there, aligned.
    pub(super) fn tensor(mut self, name: &str, shape: &[u64], kind: u32, data: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        let offset = self.data.len() as u64;
        self.data.extend(data);
        self.info(name, shape, kind, offset)
    }

    pub(super) fn info(mut self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Self {
        self.count += 1;
        self.tensors.extend(text(name));
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        self.tensors.extend(shape.iter().rev().flat_map(|size| size.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(self.keys.to_le_bytes());
        bytes.extend(&self.metadata);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }

    pub(super) fn open(&self) -> Result<Gguf> {
        open(&self.bytes())
    }
}

fn open(bytes: &[u8]) -> Result<Gguf> {
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    Gguf::open(&[file.path().to_owned()])
}

fn small() -> Writer {
    Writer::default()
        .text("general.architecture", "gemma4")
        .number("gemma4.block_count", 2)
        .float("gemma4.attention.layer_norm_rms_epsilon", 1e-6)
        .raw("flag", 7, &[1])
        .raw("minus", 11, &(-3_i64).to_le_bytes())
        .texts("tokenizer.ggml.tokens", &["<pad>", "▁é", ""])
        .list("pattern", 7, &[vec![1], vec![0]])
        .list("numbers", 5, &[(-1_i32).to_le_bytes().to_vec(), 7_i32.to_le_bytes().to_vec()])
        .tensor("token_embd.weight", &[3, 2], 0, &[1; 24])
        .tensor("blk.0.attn_q.weight", &[2, 64], 2, &[2; 72])
}

fn refusal(bytes: &[u8]) -> String {
    open(bytes).err().unwrap().to_string()
}

#[test]
fn all_kinds_of_values_are_read() {
    let gguf = small().open().unwrap();
    let metadata = gguf.metadata();
    assert_eq!(metadata.get("general.architecture"), Some(Value::Text("gemma4")));
    assert_eq!(metadata.get("flag"), Some(Value::Bool(true)));
    assert_eq!(metadata.get("minus"), Some(Value::Signed(-3)));
    let items = |key| metadata.list(key).unwrap().unwrap().iter().collect::<Vec<_>>();
    let tokens = ["<pad>", "▁é", ""].map(Value::Text);
    assert_eq!(items("tokenizer.ggml.tokens"), tokens);
    assert_eq!(items("pattern"), [Value::Bool(true), Value::Bool(false)]);
    assert_eq!(items("numbers"), [Value::Signed(-1), Value::Signed(7)]);
    let eps = metadata.number("gemma4.attention.layer_norm_rms_epsilon").unwrap().unwrap();
    assert_eq!(eps.as_f64(), Some(1e-6));
    assert_eq!(metadata.iter().count(), 8);
}

#[test]
fn tensors_have_shapes_rows_first_and_the_bytes_of_their_type() {
    let gguf = small().open().unwrap();
    let (file, table) = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!((&*table.shape, table.kind), (&[3, 2][..], Type::F32));
    assert_eq!(file.map.bytes()[table.range.clone()], [1; 24]);
    let (file, blocks) = gguf.tensor("blk.0.attn_q.weight").unwrap();
    assert_eq!((&*blocks.shape, blocks.kind), (&[2, 64][..], Type::Q4_0));
    assert_eq!(file.map.bytes()[blocks.range.clone()], [2; 72]);
}

#[test]
fn what_is_wrong_is_named() {
    let cases = [
        (small().number("flag", 1), "`flag`: expected the key once"),
        (small().raw("x", 13, &[]), "`x`: expected a value type from 0 to 12, found 13"),
        (small().raw("x", 7, &[2]), "`x`: expected 0 or 1"),
        (small().raw("x", 8, &u64::MAX.to_le_bytes()), "`x`: expected"),
        (small().raw("x", 8, &[2, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe]), "`x`: expected UTF-8"),
        (small().list("x", 9, &[]), "`x`: expected a list of numbers, booleans or texts"),
        (small().number("general.alignment", 0), "`general.alignment`"),
        (small().number("general.alignment", 24), "`general.alignment`"),
        (small().number("split.count", 2), "`split.count`: expected 1"),
        (small().number("split.no", 1), "`split.no`: expected 0"),
        (
            small().tensor("token_embd.weight", &[1], 0, &[0; 4]),
            "`token_embd.weight`: expected the name once",
        ),
        (small().info("a", &[], 0, 0), "`a`: expected 1 to 4 dimensions, found 0"),
        (small().info("a", &[1; 5], 0, 0), "`a`: expected 1 to 4 dimensions, found 5"),
        (small().info("a", &[0], 0, 0), "`a`: expected sizes from 1"),
        (small().info("a", &[1 << 40, 1 << 40], 0, 0), "`a`: expected a tensor that fits"),
        (small().info("a", &[33], 2, 0), "`a`: expected rows of a multiple of 32"),
        (small().info("a", &[1], 99, 0), "`a`: expected a ggml type"),
        (small().info("a", &[1], 10, 0), "type Q2_K of tensor `a`"),
        (small().info("a", &[1], 0, 7), "`a`: expected an offset divisible by 32"),
        (small().info("a", &[1], 0, 1 << 62), "`a`: expected bytes"),
        (small().info("a", &[1], 0, 0), "overlaps with tensor"),
    ];
    for (writer, wanted) in cases {
        let text = refusal(&writer.bytes());
        assert!(text.contains(wanted) && text.contains(".gguf"), "{wanted}: {text}");
        assert!(text.len() < 1000);
    }
}

#[test]
fn absurd_counts_and_lengths_are_refused_before_anything_is_made() {
    let good = small().bytes();
    for (at, what) in [(8, "tensors"), (16, "metadata keys")] {
        for count in [u64::MAX, 1 << 40, 1 << 17] {
            let mut bytes = good.clone();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            let text = refusal(&bytes);
            assert!(text.contains(what) && text.contains(&count.to_string()), "{text}");
        }
    }
    let long = [&8_u32.to_le_bytes()[..], &(1_u64 << 40).to_le_bytes()].concat();
    assert!(
        refusal(&small().raw("x", 9, &long).bytes()).contains("`x`: expected a list of at most")
    );
    assert!(refusal(b"GGUF\x01\0\0\0").contains("version 2 or 3, found 1"));
    assert!(refusal(b"GGUF\0\0\0\x03").contains("big-endian"));
    assert!(refusal(b"PK\x03\x04").contains("expected a GGUF file"));
    assert!(refusal(b"").contains("cut short"));
}

#[test]
fn a_set_of_files_is_one_model_and_its_keys_must_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let part = |number: u16, count: u16, tensors: u32| {
        Writer::default()
            .raw("split.no", 2, &number.to_le_bytes())
            .raw("split.count", 2, &count.to_le_bytes())
            .raw("split.tensors.count", 5, &tensors.to_le_bytes())
            .tensor(&format!("t{number}"), &[1], 0, &[0; 4])
            .bytes()
    };
    let open = |parts: [Vec<u8>; 2]| {
        let paths =
            [1, 2].map(|number| folder.path().join(format!("m-0000{number}-of-00002.gguf")));
        for (path, part) in paths.iter().zip(&parts) {
            std::fs::write(path, part).unwrap();
        }
        Gguf::open(&files_of(folder.path()).unwrap().unwrap())
    };
    let whole = open([part(0, 2, 2), part(1, 2, 2)]).unwrap();
    assert!(whole.tensor("t0").is_some() && whole.tensor("t1").is_some());
    for (parts, key) in [
        ([part(0, 2, 3), part(1, 2, 3)], "split.tensors.count"),
        ([part(1, 2, 2), part(0, 2, 2)], "split.no"),
        ([part(0, 3, 2), part(1, 3, 2)], "split.count"),
    ] {
        let text = open(parts).err().unwrap().to_string();
        assert!(text.contains(key), "{text}");
    }
    assert!(open([part(0, 2, 2), part(0, 2, 2)]).err().unwrap().to_string().contains("`t0`"));
    std::fs::remove_file(folder.path().join("m-00002-of-00002.gguf")).unwrap();
    let set = files_of(&folder.path().join("m-00001-of-00002.gguf")).unwrap().unwrap();
    assert!(Gguf::open(&set).err().unwrap().to_string().contains("m-00002-of-00002.gguf"));
}

/// All that an opened file promises may be read.
fn read_all(path: &Path) {
    let Ok(gguf) = Gguf::open(&[path.to_owned()]) else { return };
    for file in &gguf.files {
        for (_, value) in file.metadata.iter() {
            if let Value::List(list) = value {
                assert_eq!(list.iter().count(), list.len());
            }
        }
        for tensor in &file.tensors {
            assert!(tensor.range.end <= file.map.bytes().len());
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_changed_are_refused_or_read_without_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let mut bytes = small().bytes();
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read_all(file.path());
    }
}
