/** Arrays on disk that are read by rows: local data, and recorded activations. */

import { OpenFile } from "./storage.js";
import { BYTES, bytesOf, numbers, sizeOf, type Dtype, type Tensor } from "./tensors.js";

export class RowFile {
  private constructor(
    private readonly file: OpenFile,
    readonly dtype: Dtype,
    readonly rowShape: number[],
    private filled: number,
  ) {}

  /** The first `rows` rows of the file stay; what follows them is overwritten. */
  static async open(
    folder: FileSystemDirectoryHandle,
    name: string,
    dtype: Dtype,
    rowShape: number[],
    rows: number,
  ): Promise<RowFile> {
    const opened = new RowFile(await OpenFile.at(folder, name), dtype, rowShape, rows);
    if (opened.file.size < rows * opened.rowBytes) {
      opened.file.close();
      throw new DOMException(`${name} is incomplete`, "NotFoundError");
    }
    return opened;
  }

  get rows(): number {
    return this.filled;
  }

  private get rowBytes(): number {
    return sizeOf(this.rowShape) * BYTES[this.dtype];
  }

  append(rows: Tensor): void {
    this.file.write(bytesOf(rows.data), this.filled * this.rowBytes);
    this.filled += rows.shape[0] ?? 0;
  }

  read(indices: Int32Array): Tensor {
    const width = this.rowBytes;
    const bytes = new Uint8Array(indices.length * width);
    indices.forEach((index, i) => bytes.set(this.file.read(index * width, width), i * width));
    const shape = [indices.length, ...this.rowShape];
    return { dtype: this.dtype, shape, data: numbers(this.dtype, bytes.buffer) };
  }

  flush(): void {
    this.file.flush();
  }

  close(): void {
    this.file.close();
  }
}
