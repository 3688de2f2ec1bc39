//! The error of this crate: a kind that the C++ side maps to its own codes, and a sentence for people.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Kind {
    InvalidArgument = 1,
    CorruptData = 2,
    ResourceExhausted = 3,
    Internal = 4,
}

#[derive(Debug)]
pub struct TextError {
    pub kind: Kind,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, TextError>;

pub fn invalid(message: impl Into<String>) -> TextError {
    TextError { kind: Kind::InvalidArgument, message: message.into() }
}

pub fn corrupt(message: impl Into<String>) -> TextError {
    TextError { kind: Kind::CorruptData, message: message.into() }
}

pub fn internal(message: impl Into<String>) -> TextError {
    TextError { kind: Kind::Internal, message: message.into() }
}
